"""The usage of tenants: snapshots of counters in the registry, one a minute for a day.

A source is a gateway, which counts tokens, or a pool, which counts block-ms. Its counters only
grow, so their difference between two snapshots is what was used meanwhile. A source that is killed
loses the counts of its last seconds, and a server that loses its data loses the snapshots.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from blockstore.registry import Registry

KEPT_S = 24 * 3600


class Used(NamedTuple):
    """The usage that a source has counted for a tenant since the source began."""

    block_ms: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The prompt tokens that were found in the prefix cache."""
    generated_tokens: int = 0

    def plus(self, other: "Used", factor: int = 1) -> "Used":
        return Used(*(mine + factor * its for mine, its in zip(self, other, strict=True)))


async def write_usage(
    registry: Registry, source: str, began_s: float, used: Mapping[str, Used]
) -> None:
    """Write the counters of a source, by tenant. Raises errors of the store."""
    minute = int(time.time() // 60)
    await registry.set_usage(minute, source, json.dumps([int(began_s), used]))


async def used_since(registry: Registry, since_s: float) -> dict[str, Used]:
    """Return what each tenant used from the beginning of that minute on. Raises errors of the
    store."""
    before = int(since_s // 60) - 1
    first: dict[str, dict[str, Used]] = {}
    last: dict[str, dict[str, Used]] = {}
    entries = await registry.usage(before, int(time.time() // 60) + 1)
    for minute, entry in enumerate(entries, before):
        for source, text in entry.items():
            began_s, counters = json.loads(text)
            last[source] = {tenant: Used(*numbers) for tenant, numbers in counters.items()}
            is_new = minute > before and began_s >= before * 60
            first.setdefault(source, {} if is_new else last[source])
    total = defaultdict[str, Used](Used)
    for source, found in last.items():
        for tenant, used in found.items():
            earlier = first[source].get(tenant, Used())
            total[tenant] = total[tenant].plus(used).plus(earlier, -1)
    return dict(total)
