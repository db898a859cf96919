"""A pool with fake KV and, if wanted, a swap pool beside it; the parts of workers on both."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from services.engine.forward import ForwardPass
from services.runtime.metrics import WorkerMetrics
from services.worker.limits import Limits
from services.worker.pool_engine import WorkerParts
from services.worker.swap.pool import SwapPool

from .fakes import Arena, join, make_pool, make_stamps


class FakePools:
    """`arena`: the KV of the pool. `swap_arena`: that of the swap pool; None: there is none."""

    def __init__(self, store: MemoryStore, spec: PoolSpec, arena: Arena) -> None:
        self.store, self.spec, self.arena = store, spec, arena
        self.swap_spec: PoolSpec
        self.swap_arena: Arena | None = None

    @classmethod
    async def make(
        cls,
        store: MemoryStore,
        directory: Path,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int = 0,
    ) -> Self:
        spec = await make_pool(store, num_blocks, block_size)
        pools = cls(store, spec, Arena(block_size, make_stamps(directory / "stamps", spec)))
        if num_swap_blocks:
            swap_spec = await make_pool(store, num_swap_blocks, block_size, "colder")
            stamps = make_stamps(directory / "colder", swap_spec)
            pools.swap_spec, pools.swap_arena = swap_spec, Arena(block_size, stamps)
        return pools

    async def join(
        self,
        worker_id: str,
        forward: ForwardPass,
        limits: Limits,
        metrics: WorkerMetrics,
        *,
        store: Any = None,
        swap_class: type[SwapPool] = SwapPool,
        compares_costs: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> WorkerParts:
        """Join both pools. `store`: the store as the worker reaches it; None: directly."""
        store, swap_pool = store or self.store, None
        membership = await join(self.store, self.spec, worker_id, self.arena.stamps)
        if self.swap_arena is not None:
            swap_pool = swap_class(
                store,
                membership,
                await join(self.store, self.swap_spec, worker_id, self.swap_arena.stamps),
                partial(self.swap_arena.copy_from, self.arena),
                partial(self.arena.copy_from, self.swap_arena),
                metrics,
                compares_costs,
                check,
            )
        return WorkerParts(store, membership, forward, limits, metrics, swap_pool)
