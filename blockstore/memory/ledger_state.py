"""The state of one pool's ledger in memory, and the steps that make up its operations."""

from collections.abc import Callable, Sequence

from blockstore.errors import MustWait, OutOfBlocks, StaleHolder, UnknownWorker, WorkerFenced
from blockstore.memory.arguments import check
from blockstore.memory.blocks import Blocks
from blockstore.memory.holders import Holder, Holders, Tombstones
from blockstore.memory.rebuilding import Rebuilding
from blockstore.memory.retentions import Retentions
from blockstore.memory.waiters import Waiter, Waiters
from blockstore.records import Grown, Growth, PoolSpec


class LedgerState:
    """Holders, blocks, prefix index and waiters of one pool.

    `clock` returns seconds from any start; the age of tombstones, the end of leases and the
    time of shares depend on it. `missing` are the workers of a pool whose ledger was lost, or None
    for a new pool.
    """

    def __init__(
        self,
        spec: PoolSpec,
        clock: Callable[[], float],
        ledger_epoch: int = 1,
        missing: Sequence[str] | None = None,
    ) -> None:
        self.spec = spec
        self.ledger_epoch = ledger_epoch
        self.rebuilding = Rebuilding(missing or (), is_over=missing is None)
        self.blocks = Blocks(spec.num_blocks, clock)
        self.workers = dict.fromkeys(missing or (), False)  # worker -> fenced
        self.leases: dict[str, float] = {}  # member on another host -> end of its lease
        self.clock = clock
        self.holders = Holders()
        self.waiters = Waiters()
        self.retentions = Retentions(clock)
        self.demands: set[str] = set()  # holders to preempt
        self.released = Tombstones(clock)
        self.reaped = Tombstones(clock)
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    # Checks

    def _require_known(self, worker_id: str) -> None:
        check(worker_id=worker_id)
        if worker_id not in self.workers:
            raise UnknownWorker(f"worker {worker_id} is not on pool {self.spec.pool_id}")

    def _require_live(self, worker_id: str) -> None:
        self._require_known(worker_id)
        if self.workers[worker_id]:
            raise WorkerFenced(f"worker {worker_id} is fenced")

    def _require_unfenced(self, holder_id: str) -> Holder:
        holder = self.holders.require(holder_id)
        self._require_live(holder.worker_id)
        return holder

    # Admission and growth

    def _check_admission(
        self, holder_id: str, waiter: Waiter, hits: Sequence[int], num_blocks: int
    ) -> None:
        self.waiters[holder_id] = waiter
        if not self.waiters.is_first(waiter):
            raise MustWait(f"an earlier request than {waiter.order} waits")
        num_pinned = sum(block_id not in self.blocks.refs for block_id in hits)
        watermark = self.spec.watermark_blocks if self.blocks.refs else 0
        needed = num_blocks - len(hits)
        available = max(0, self.blocks.num_available - num_pinned - watermark)
        if needed > available:
            raise OutOfBlocks(needed, available)
        del self.waiters[holder_id]

    def _admit(self, holder: Holder, hits: Sequence[int], num_blocks: int) -> None:
        self.blocks.share(hits, holder.holder_id)  # first, so that `take` does not evict them
        holder.acquire(hits)
        holder.acquire(self._take(num_blocks - len(hits), holder.holder_id))
        self.holders[holder.holder_id] = holder

    def _grow(self, worker_id: str, growth: Growth) -> Grown:
        holder = self.holders.get(growth.holder_id)
        if holder is None or (holder.worker_id, holder.epoch) != (worker_id, growth.epoch):
            return Grown(growth.holder_id, (), StaleHolder.code)
        needed = growth.total - len(holder.acquired)
        if needed > self.blocks.num_available:
            return Grown(growth.holder_id, (), OutOfBlocks.code)
        holder.acquire(self._take(needed, holder.holder_id))
        return Grown(growth.holder_id, tuple(holder.acquired[growth.have : growth.total]))

    def _take(self, num_blocks: int, holder_id: str) -> list[int]:
        if num_blocks > self.blocks.num_free:
            self.retentions.end_expired(self.blocks)
        return self.blocks.take(num_blocks, holder_id)

    def _demand_one(self) -> None:
        if any(not self.workers[self.holders[h].worker_id] for h in self.demands):
            return  # a demand is outstanding
        last = self._last_in_order()
        if last is not None:
            self.demands.add(last.holder_id)

    # Release

    def _drop(self, holder: Holder, block_ids: set[int]) -> None:
        """Drop blocks from the last acquired to the first, so that tails are evicted before
        heads."""
        for block_id in reversed(holder.acquired):
            if block_id not in block_ids or block_id not in holder.held:
                continue
            holder.held.remove(block_id)
            self.blocks.drop(block_id, holder.holder_id)

    def _end(self, holder: Holder) -> None:
        self._drop(holder, set(holder.held))
        self.demands.discard(holder.holder_id)
        del self.holders[holder.holder_id]
        self.released.add(holder.holder_id, holder.epoch)

    # Demands

    def _demands_of(self, worker_id: str) -> tuple[str, ...]:
        own = self.holders.of(worker_id)
        return tuple(holder.holder_id for holder in own if holder.holder_id in self.demands)

    def _last_in_order(self) -> Holder | None:
        live = [h for h in self.holders.values() if not self.workers[h.worker_id]]
        return max(live, key=lambda holder: holder.sort_key, default=None)
