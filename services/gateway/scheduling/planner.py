"""Exports how many workers of each role the load of each model needs, for an autoscaler."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from prometheus_client import Gauge

from blockstore.registry import Member, Registry
from blockstore.store import BlockStore
from quire.planning import held_share, plan_decode, plan_prefill

INTERVAL_S = 5.0


async def export_plans(
    registry: Registry,
    store: BlockStore,
    num_waiting: Callable[[str], int],
    recommended: Gauge,
    ttft_s: float,
    inter_token_s: float,
) -> None:
    """Plan each model's workers from their reports to the registry. `num_waiting` returns the
    number of requests in a model's queue. Raises BlockStoreError; the last recommendation stays
    then."""
    models: dict[str, list[Member]] = defaultdict(list)
    for member in await registry.members():
        if member.model and member.state == "serving":
            models[member.model].append(member)
    for name, members in models.items():
        stats = await asyncio.gather(*map(store.stats, {member.pool_id for member in members}))
        held = held_share((each.num_held, each.spec.num_blocks) for each in stats)
        prefill = [member.load for member in members if member.role == "prefill"]
        decode = [member.load for member in members if member.role == "decode"]
        plans = {
            "prefill": plan_prefill(prefill, ttft_s),
            "decode": plan_decode(decode, inter_token_s, num_waiting(name), held),
        }
        for role, plan in plans.items():
            recommended.labels(name, role).set(plan.recommended)
