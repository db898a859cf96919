"""Reads the counters of a deployment's processes from their metrics endpoints."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families


def totals(*addresses: str) -> Mapping[str, float]:
    """The sum of all samples of each name, over the processes that listen there; one that has left
    counts nothing."""
    sums = defaultdict[str, float](float)
    for address in addresses:
        with suppress(httpx.ConnectError):
            text = httpx.get(f"http://{address}/metrics").text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    sums[sample.name] += sample.value
    return sums
