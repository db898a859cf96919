"""A prefill and two decode workers on one pool, and two gateways, with random delays between them
in virtual time: minutes of waiting take milliseconds, and a hang shows as hours."""

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from services.engine.forward import ForwardPass
from services.runtime.metrics import WorkerMetrics
from services.worker.limits import Limits
from services.worker.pool_worker import PoolWorker
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill
from tests.late_device import Device, LateForward
from tests.property.gateway import Gateway, Request
from tests.property.late import LateColderPool, LateStore
from tests.unit.workers.fake_pools import FakePools
from tests.unit.workers.fakes import Arena, FakeForward
from tests.waiting import until

HANG_S = 60.0


class Pair:
    """The workers of one pool and their gateways."""

    def __init__(self, chance: random.Random, device: Device) -> None:
        self.chance = chance
        self._device = device
        self._forwards: dict[str, ForwardPass] = {}
        self.store = MemoryStore()
        self.prefill: PoolWorker[Prefill]
        self.decode: tuple[PoolWorker[Decode], ...]
        self.arena: Arena
        self.swap_pool: Arena | None = None
        self.draining = False
        self.gateways: tuple[Gateway, ...] = ()
        self._holders = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def next_holder(self) -> int:
        return next(self._holders)

    async def open(
        self,
        directory: Path,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        num_swap_blocks: int = 0,
    ) -> None:
        pools = await FakePools.make(self.store, directory, num_blocks, block_size, num_swap_blocks)
        self.arena, self.swap_pool = pools.arena, pools.swap_arena
        model = FakeForward(self.arena)
        workers: list[Any] = []
        roles: tuple[Any, ...] = (Prefill, Decode, Decode)
        for number, role in enumerate(roles):
            worker_id = f"{role.__name__}-{number}"
            forward = self._forwards[worker_id] = self._device(model)
            parts = await pools.join(
                worker_id,
                forward,
                limits,
                WorkerMetrics(CollectorRegistry()),
                store=LateStore(self.store, self.chance, self._check_flights),
                swap_class=LateColderPool,
            )
            if isinstance(parts.swap_pool, LateColderPool):
                parts.swap_pool.chance = self.chance
            workers.append(PoolWorker(parts, role))
        self.prefill, *decode = workers
        self.decode = tuple(decode)
        self._tasks = [asyncio.create_task(worker.run()) for worker in workers]
        self.gateways = Gateway(self), Gateway(self)

    def _check_flights(self) -> None:
        """No worker is given a block that a step in flight of another worker reads or writes."""
        for worker_id, forward in self._forwards.items():
            if isinstance(forward, LateForward):
                holders = self.store.ledger("pool").holders.values()
                held = [holder.held for holder in holders if holder.worker_id == worker_id]
                assert forward.block_ids <= set().union(*held)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for the condition; fails if a worker fails, or if it takes too long."""

        def all_run_and_it_holds() -> bool:
            for task in self._tasks:
                assert not task.done(), task.exception()
            return holds()

        await until(all_run_and_it_holds, limit_s=HANG_S)

    async def drain(self) -> None:
        """Drain the workers; returns when they have no request left."""
        self.draining = True
        for worker in self.workers:
            worker.drain()
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(worker.drained() for worker in self.workers))

    @property
    def workers(self) -> tuple[PoolWorker[Any], ...]:
        return self.prefill, *self.decode

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def requests(self) -> list[Request]:
        return [r for gateway in self.gateways for r in gateway.requests.values()]

    @property
    def leftovers(self) -> dict[str, object]:
        """The remains of finished requests, by place."""
        stats = self.store.ledger("pool").stats()
        prefill = self.prefill
        places: dict[str, object] = {
            "held": stats.num_held,
            "waiters": stats.num_waiters,
            "prefill": prefill.role.jobs or prefill.role.running,
            "timers": prefill.role.jobs._timers,
            "admission": len(prefill.role._admission),
            "prefixes": len(prefill.role._admission.prefixes),
        }
        if self.swap_pool:
            places["swapped out"] = self.store.ledger("colder").stats().num_held
            places["fetching"] = prefill.role._fetching.locked()
        for number, decode in enumerate(self.decode):
            extender = decode.role._extender
            places[f"decode {number}"] = decode.role.jobs or decode.role.running
            places[f"timers {number}"] = decode.role.jobs._timers
            places[f"grower {number}"] = extender._holders or extender._wanting
            places[f"slots {number}"] = (
                decode.limits.max_num_seqs - decode.role.load().num_free_slots
            )
        return {place: what for place, what in places.items() if what}
