"""Counters of a deployment's processes, figures and markdown tables, which benchmarks share."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families


def totals(*addresses: str) -> Mapping[str, float]:
    """The sum of all samples of each name, over the processes whose metrics are at the addresses; a
    process that has left counts nothing."""
    sums = defaultdict[str, float](float)
    for address in addresses:
        with suppress(httpx.ConnectError):
            text = httpx.get(f"http://{address}/metrics").text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    sums[sample.name] += sample.value
    return sums


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are figures."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def shown(value: float) -> str:
    """Three significant digits, and all of a whole number."""
    if math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".removesuffix(".")
