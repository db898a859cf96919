"""Exports how many workers of each role the load of each model needs, for an autoscaler."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from prometheus_client import Gauge

from blockstore.errors import BlockStoreError
from blockstore.registry import Member, Registry
from blockstore.store import BlockStore
from quire.planning import Plan, Targets, held_share, plan

INTERVAL_S = 5.0


class Planner:
    """Plans each model's workers every `INTERVAL_S`, from what they report to the registry.
    `num_waiting`: requests in a model's queue."""

    def __init__(
        self,
        registry: Registry,
        store: BlockStore,
        num_waiting: Callable[[str], int],
        recommended: Gauge,
        targets: Targets,
    ) -> None:
        self._registry = registry
        self._store = store
        self._num_waiting = num_waiting
        self._recommended = recommended
        self._targets = targets

    async def run(self) -> NoReturn:
        while True:
            with suppress(BlockStoreError):  # then the last recommendation stays
                await self.export()
            await asyncio.sleep(INTERVAL_S)

    async def export(self) -> None:
        models: dict[str, list[Member]] = defaultdict(list)
        for member in await self._registry.members():
            if member.model and member.state == "serving":
                models[member.model].append(member)
        for name, members in models.items():
            planned = await self._plan(name, members)
            for role, of_role in (("prefill", planned.prefill), ("decode", planned.decode)):
                self._recommended.labels(name, role).set(of_role.recommended)

    async def _plan(self, name: str, members: list[Member]) -> Plan:
        pool_ids = sorted({member.pool_id for member in members})
        stats = await asyncio.gather(*map(self._store.stats, pool_ids))
        return plan(
            [member.load for member in members if member.role == "prefill"],
            [member.load for member in members if member.role == "decode"],
            self._targets,
            self._num_waiting(name),
            held_share((each.num_held, each.spec.num_blocks) for each in stats),
        )
