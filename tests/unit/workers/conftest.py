"""One pool of 32 blocks of 4 tokens, with a prefill and a decode worker on it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from services.runtime.metrics import WorkerMetrics
from services.worker.limits import Limits
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill
from tests.late_device import DEVICES, Device, LateForward
from tests.waiting import until

from .fake_pools import FakePools
from .fakes import Arena, FakeForward, FakeSession, join
from .kept_blocks import file_cache


@dataclass
class WorkerPair:
    """A prefill and a decode worker on one arena and one store, with fake models."""

    store: MemoryStore
    spec: PoolSpec
    arena: Arena
    prefill: PoolWorker[Prefill]
    decode: PoolWorker[Decode]
    prefill_model: FakeForward
    decode_model: FakeForward
    session: FakeSession
    decode_figures: CollectorRegistry
    swap_pool: Arena | None = None
    is_late: bool = False
    """Whether steps are in flight while others are launched (`tests.late_device`)."""

    async def until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        await until(condition, limit_s=limit_s)

    async def another(self, worker_id: str, role: type[Any], **fields: Any) -> PoolWorker[Any]:
        """Another worker on the pool, which does not run yet."""
        member = await join(self.store, self.spec, worker_id, self.arena.stamps)
        parts = self.store, member, FakeForward(self.arena), self.decode.limits
        return PoolWorker(WorkerParts(*parts, WorkerMetrics(CollectorRegistry()), **fields), role)

    async def until_empty(self) -> None:
        """Wait until no block is held, and check every law of the ledger."""
        await self._until_nothing_held("pool")
        for pool_id in await self.store.pool_ids():
            assert (await self.store.audit(pool_id)).violations == ()

    async def until_colder_is_empty(self) -> None:
        """Wait until no block of the swap pool is held."""
        await self._until_nothing_held("colder")

    async def _until_nothing_held(self, pool_id: str) -> None:
        await until(lambda: self.store.stats(pool_id), lambda stats: not stats.num_held)


MakePair = Callable[..., "asyncio.Future[WorkerPair]"]


@asynccontextmanager
async def running(worker: PoolWorker[Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), outcome


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return DEVICES[request.param]


counts_steps = pytest.mark.parametrize("device", ["computes at launch"], indirect=True)
"""For tests that expect a certain state after a number of steps. On a late device it depends on
whether a block has arrived before the next launch."""


@pytest.fixture
async def make_pair(tmp_path: Path, device: Device) -> AsyncIterator[MakePair]:
    async with AsyncExitStack() as stack:

        async def make(
            num_blocks: int = 32,
            block_size: int = 4,
            *,
            max_num_seqs: int = 16,
            max_num_batched_tokens: int = 16,
            ticket_ttl_s: float = 30.0,
            num_swap_blocks: int = 0,
            compares_costs: bool = False,
            park_window_s: float = 0.0,
            cache: Path | None = None,
            store: MemoryStore | None = None,
        ) -> WorkerPair:
            """`num_swap_blocks`: with a colder pool of so many blocks. `cache`: with blocks in
            files of this directory."""
            store = store or MemoryStore()
            pools = await FakePools.make(store, tmp_path, num_blocks, block_size, num_swap_blocks)
            limits = Limits(
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len=1000,
                look_ahead=2,
                ticket_ttl_s=ticket_ttl_s,
                park_window_s=park_window_s,
            )
            models = FakeForward(pools.arena), FakeForward(pools.arena)
            figures = CollectorRegistry(), CollectorRegistry()
            workers: list[Any] = []
            roles: tuple[Any, ...] = Prefill, Decode
            for role, model, registry in zip(roles, models, figures, strict=True):
                parts = await pools.join(
                    role.__name__,
                    device(model),
                    limits,
                    WorkerMetrics(registry),
                    compares_costs=compares_costs,
                )
                if parts.swap_pool is not None:
                    stack.callback(parts.swap_pool.close)
                if cache is not None:
                    files = file_cache(cache, pools, parts.metrics, role.__name__)
                    stack.callback(files.close)
                    parts = replace(parts, files=files)
                workers.append(PoolWorker(parts, role))
                await stack.enter_async_context(running(workers[-1]))
            for model in models:
                stack.callback(model.gate.set)
            prefill, decode = workers
            return WorkerPair(
                *(store, pools.spec, pools.arena, prefill, decode, *models, FakeSession()),
                figures[1],
                pools.swap_arena,
                device is LateForward,
            )

        yield make  # type: ignore[misc]


@pytest.fixture
async def pair(make_pair: MakePair) -> WorkerPair:
    return await make_pair()
