"""The ledger of one pool in memory: its holders, blocks, prefix index and waiters.

The ledger implements the contract of `blockstore.store` in plain, synchronous Python. `MemoryStore`
keeps one for each pool; the explorer in tests/model_checking copies it to visit all its states.
Every method checks everything before it changes anything, so that an error leaves the ledger as it
was (except for the waiter that a refused `allocate` leaves).
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Self

from blockstore.arguments import check, check_prefix, check_same_pool
from blockstore.blocks import Blocks
from blockstore.errors import (
    MustWait,
    NotHeld,
    OutOfBlocks,
    StaleHolder,
    UnknownWorker,
    WorkerFenced,
    WorkerNotEmpty,
)
from blockstore.holders import Holder, Holders, Tombstones
from blockstore.rebuilding import Rebuilding, quarantine_of
from blockstore.records import (
    Allocation,
    Asserted,
    Claim,
    Content,
    Extension,
    Grown,
    Growth,
    Heartbeat,
    HolderInfo,
    PoolSpec,
    PoolStats,
    PrefixHash,
    Wait,
)
from blockstore.store import QUARANTINE
from blockstore.waiters import Waiter, Waiters


class Ledger:
    """The ledger of one pool. The methods and their errors are those of `BlockStore`, without the
    pool_id.

    `clock` returns seconds from any start; only the age of tombstones depends on it. `missing`: the
    workers of a pool whose ledger was lost; None: the pool is new.
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
        self.blocks = Blocks(spec.num_blocks)
        self.workers = dict.fromkeys(missing or (), False)  # worker -> fenced
        self.holders = Holders()
        self.waiters = Waiters()
        self.demands: set[str] = set()  # holders to preempt
        self.released = Tombstones(clock)
        self.reaped = Tombstones(clock)
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    # Workers

    def register_worker(self, spec: PoolSpec, worker_id: str) -> None:
        check(spec=spec, worker_id=worker_id)
        if self.reaped.epoch(worker_id) is not None:
            raise UnknownWorker(f"worker {worker_id} was reaped; names are never reused")
        if self.workers.get(worker_id):
            raise WorkerFenced(f"worker {worker_id} is fenced")
        check_same_pool(self.spec, spec, worker_id)
        self.workers[worker_id] = False
        self.rebuilding.missing.discard(worker_id)

    def fence(self, worker_id: str) -> None:
        self._known(worker_id)
        self.workers[worker_id] = True
        self.waiters.end_of(worker_id)
        if worker_id in self.rebuilding.missing:
            self.rebuilding.missing.remove(worker_id)
            self.rebuilding.top = self.spec.num_blocks  # restore needs the stamps of all blocks
            self.holders[QUARANTINE + worker_id] = quarantine_of(worker_id)

    def leave(self, worker_id: str) -> None:
        check(worker_id=worker_id)
        num_held, num_waiting = len(self.holders.of(worker_id)), len(self.waiters.of(worker_id))
        if num_held or num_waiting:
            raise WorkerNotEmpty(f"{worker_id} has {num_held} holders and {num_waiting} waiters")
        self.workers.pop(worker_id, None)
        self.rebuilding.missing.discard(worker_id)

    def heartbeat(self, worker_id: str) -> Heartbeat:
        self._known(worker_id)
        self.rebuilding.require_heard(worker_id)
        return Heartbeat(self.workers[worker_id], self._demands_of(worker_id))

    def reap(self, worker_id: str) -> int:
        check(worker_id=worker_id)
        dead = self.holders.of(worker_id)
        for holder in reversed(dead):
            self._end(holder)
        self.waiters.end_of(worker_id)
        self.workers.pop(worker_id, None)
        self.rebuilding.missing.discard(worker_id)
        self.reaped.bury(worker_id)
        return len(dead)

    # Recovery

    def reassert(
        self, worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
    ) -> tuple[str, ...]:
        if self.reaped.epoch(worker_id) is not None:
            raise UnknownWorker(f"worker {worker_id} was reaped; names are never reused")
        if self.rebuilding.is_over:
            self._live(worker_id)
            return ()
        if self.workers.setdefault(worker_id, False):
            raise WorkerFenced(f"worker {worker_id} is fenced")
        for asserted in holders:
            known = self.holders.get(asserted.holder_id)
            holder = self.rebuilding.enter(known, asserted, worker_id)
            if holder is not None:
                if known is not None:
                    self._drop(known, set(known.held))
                self.blocks.share(sorted(holder.held))
                self.holders[holder.holder_id] = holder
        for wait in waits:
            self.waiters[wait.holder_id] = Waiter(wait.order, worker_id)
            if wait.released_epoch:
                self.released.bury(wait.holder_id, wait.released_epoch)
        self.rebuilding.missing.discard(worker_id)
        return tuple(sorted(self.rebuilding.missing))

    def restore(self, first: int, contents: Sequence[Content]) -> None:
        if not self.rebuilding.is_over:
            self.rebuilding.require_all_heard()
            quarantines = [h for key, h in self.holders.items() if key.startswith(QUARANTINE)]
            self.rebuilding.restore(self.blocks, quarantines, first, contents)

    def reopen(self) -> None:
        if not self.rebuilding.is_over:
            self.rebuilding.require_all_heard()
            self.rebuilding.end(self.blocks)

    # Holders

    def allocate(
        self,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        check(holder_id=holder_id, worker_id=worker_id, order=order, num_blocks=num_blocks)
        check_prefix(hashes, branches, num_blocks)
        self.rebuilding.require_over()
        self._live(worker_id)
        if self.released.epoch(holder_id) is not None:
            raise StaleHolder(f"{holder_id} was released")
        holder = self.holders.get(holder_id)
        if holder is None:
            self.waiters.has_come_back(order, self.released)
            hits, runs = self.blocks.hits_of_tree(hashes, branches)
            self._wait_or_go(holder_id, Waiter(order, worker_id), hits, num_blocks)
            holder = Holder(holder_id, worker_id, order, len(hits), runs=runs)
            self._admit(holder, hits, num_blocks)
            self.num_prefix_queries += len(set(hashes).union(*branches))
            self.num_prefix_hits += len(hits)
        elif (holder.epoch, holder.worker_id) != (1, worker_id):
            raise StaleHolder(f"{holder_id} is {holder.worker_id}'s at epoch {holder.epoch}")
        block_ids = tuple(holder.acquired[:num_blocks])
        found = holder.num_cached_blocks, holder.runs
        return Allocation(holder_id, holder.epoch, block_ids, *found)

    def withdraw(self, holder_id: str) -> None:
        check(holder_id=holder_id)
        self.rebuilding.require_over()
        self.waiters.pop(holder_id, None)

    def extend(self, worker_id: str, growths: Sequence[Growth]) -> Extension:
        check(worker_id=worker_id, growths=growths)
        self.rebuilding.require_over()
        self._live(worker_id)
        grown: dict[int, Grown] = {}
        for number in sorted(
            range(len(growths)), key=lambda n: self.holders.order_of(growths[n].holder_id)
        ):
            grown[number] = self._grow(worker_id, growths[number])
        if any(answer.error == OutOfBlocks.code for answer in grown.values()):
            self._demand_one()
        answers = tuple(grown[number] for number in range(len(growths)))
        return Extension(answers, self._demands_of(worker_id))

    def commit(
        self, holder_id: str, epoch: int, blocks: Sequence[tuple[int, PrefixHash]]
    ) -> tuple[bool, ...]:
        check(holder_id=holder_id, epoch=epoch, blocks=blocks)
        self.rebuilding.require_over()
        holder = self._unfenced(holder_id)
        holder.require(epoch)
        for block_id, prefix_hash in blocks:
            if block_id not in holder.held:
                raise NotHeld(f"block {block_id} is not held by {holder_id}")
            if self.blocks.hash_of.get(block_id, prefix_hash) != prefix_hash:
                raise NotHeld(f"block {block_id} carries another hash")
        return tuple(self.blocks.publish(*block) for block in blocks)

    def retract(self, block_id: int, prefix_hash: PrefixHash) -> None:
        check(block_ids=[block_id], hashes=[prefix_hash])
        self.rebuilding.require_over()
        self.blocks.retract(block_id, prefix_hash)

    def detach(self, holder_id: str, epoch: int) -> int:
        check(holder_id=holder_id, epoch=epoch)
        self.rebuilding.require_over()
        holder = self._unfenced(holder_id)
        sent_again = epoch % 2 == 1 and holder.epoch == epoch + 1
        if not sent_again:
            holder.require(epoch)
            if epoch % 2 == 0:
                raise StaleHolder(f"{holder_id} is at rest at epoch {epoch}")
            holder.epoch += 1
        return holder.epoch

    def claim(
        self, holder_id: str, epoch: int, worker_id: str, block_ids: Sequence[int] = ()
    ) -> Claim:
        check(holder_id=holder_id, worker_id=worker_id, epoch=epoch, block_ids=block_ids)
        self.rebuilding.require_over()
        self._live(worker_id)
        holder = self.holders.require(holder_id)
        won_before = (holder.epoch, holder.worker_id) == (epoch + 1, worker_id) and epoch % 2 == 0
        if not won_before:
            holder.require(epoch)
            if epoch % 2 == 1:
                raise StaleHolder(f"{holder_id} is running on {holder.worker_id}")
        for block_id in block_ids:
            if block_id not in holder.held:
                raise NotHeld(f"block {block_id} is not held by {holder_id}")
        if not won_before:
            holder.epoch += 1
            holder.worker_id = worker_id
        return Claim.of(holder.epoch, holder.acquired, holder.held)

    def give_back(self, holder_id: str, epoch: int, block_ids: Sequence[int]) -> None:
        check(holder_id=holder_id, epoch=epoch, block_ids=block_ids)
        self.rebuilding.require_over()
        holder = self.holders.require(holder_id)
        holder.require(epoch)
        self._drop(holder, set(block_ids))

    def release(self, holder_id: str, epoch: int, comes_back: bool = False) -> None:
        check(holder_id=holder_id, epoch=epoch)
        self.rebuilding.require_over()
        if self.released.epoch(holder_id) == epoch:
            return
        holder = self.holders.require(holder_id)
        holder.require(epoch)
        self._end(holder)
        if comes_back and not self.workers[holder.worker_id]:
            self.waiters[holder_id] = Waiter(holder.order, holder.worker_id)

    # Reading

    def match(self, hashes: Sequence[PrefixHash]) -> int:
        check(hashes=hashes)
        return len(self.blocks.hits(hashes))

    def victim(self) -> HolderInfo | None:
        self.rebuilding.require_over()
        last = self._last_in_order()
        return None if last is None else last.info()

    def holder_infos(self) -> tuple[HolderInfo, ...]:
        self.rebuilding.require_over()
        return tuple(h.info() for h in sorted(self.holders.values(), key=lambda h: h.place))

    def stats(self) -> PoolStats:
        return PoolStats(
            spec=self.spec,
            num_free=self._num_free,
            num_cached=len(self.blocks.cached),
            num_held=len(self.blocks.refs),
            num_holders=len(self.holders),
            num_waiters=len(self.waiters),
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            worker_ids=tuple(sorted(self.workers)),
            fenced_worker_ids=tuple(sorted(w for w, fenced in self.workers.items() if fenced)),
            ledger_epoch=self.ledger_epoch,
            recovering=not self.rebuilding.is_over,
            missing_worker_ids=tuple(sorted(self.rebuilding.missing)),
            num_accounted=self.blocks.next_unused,
            num_to_account=self.rebuilding.top,
        )

    @property
    def _num_free(self) -> int:
        return self.blocks.num_free if self.rebuilding.is_over else len(self.blocks.returned)

    def copy(self) -> Self:
        """Return an independent ledger in the same state."""
        twin = copy.copy(self)
        own = (
            "blocks",
            "workers",
            "holders",
            "waiters",
            "demands",
            "released",
            "reaped",
            "rebuilding",
        )
        for name in own:
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def snapshot(self) -> Hashable:
        """Return a value that is equal for two ledgers if they give the same answers to all
        operations (while no tombstone expires)."""
        return (
            self.blocks.snapshot(),
            frozenset(holder.snapshot() for holder in self.holders.values()),
            frozenset(self.workers.items()),
            frozenset(self.waiters.items()),
            frozenset(self.demands),
            frozenset(self.released.epochs.items()),
            frozenset(self.reaped.epochs),
            self.rebuilding.snapshot(),
        )

    # Checks

    def _known(self, worker_id: str) -> None:
        check(worker_id=worker_id)
        if worker_id not in self.workers:
            raise UnknownWorker(f"worker {worker_id} is not on pool {self.spec.pool_id}")

    def _live(self, worker_id: str) -> None:
        self._known(worker_id)
        if self.workers[worker_id]:
            raise WorkerFenced(f"worker {worker_id} is fenced")

    def _unfenced(self, holder_id: str) -> Holder:
        holder = self.holders.require(holder_id)
        self._live(holder.worker_id)
        return holder

    # Admission and growth

    def _wait_or_go(
        self, holder_id: str, waiter: Waiter, hits: Sequence[int], num_blocks: int
    ) -> None:
        self.waiters[holder_id] = waiter
        if not self.waiters.is_first(waiter):
            raise MustWait(f"an earlier request than {waiter.order} waits")
        num_pinned = sum(block_id in self.blocks.cached for block_id in hits)
        watermark = self.spec.watermark_blocks if self.blocks.refs else 0
        needed = num_blocks - len(hits)
        available = max(0, self.blocks.num_available - num_pinned - watermark)
        if needed > available:
            raise OutOfBlocks(needed, available)
        del self.waiters[holder_id]

    def _admit(self, holder: Holder, hits: Sequence[int], num_blocks: int) -> None:
        self.blocks.share(hits)  # first, so that `take` does not evict them
        holder.acquire(hits)
        holder.acquire(self.blocks.take(num_blocks - len(hits)))
        self.holders[holder.holder_id] = holder

    def _grow(self, worker_id: str, growth: Growth) -> Grown:
        holder = self.holders.get(growth.holder_id)
        if holder is None or (holder.worker_id, holder.epoch) != (worker_id, growth.epoch):
            return Grown(growth.holder_id, (), StaleHolder.code)
        needed = growth.total - len(holder.acquired)
        if needed > self.blocks.num_available:
            return Grown(growth.holder_id, (), OutOfBlocks.code)
        holder.acquire(self.blocks.take(needed))
        return Grown(growth.holder_id, tuple(holder.acquired[growth.have : growth.total]))

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
            self.blocks.drop(block_id)

    def _end(self, holder: Holder) -> None:
        self._drop(holder, set(holder.held))
        self.demands.discard(holder.holder_id)
        del self.holders[holder.holder_id]
        self.released.bury(holder.holder_id, holder.epoch)

    # Demands

    def _demands_of(self, worker_id: str) -> tuple[str, ...]:
        own = self.holders.of(worker_id)
        return tuple(holder.holder_id for holder in own if holder.holder_id in self.demands)

    def _last_in_order(self) -> Holder | None:
        live = [h for h in self.holders.values() if not self.workers[h.worker_id]]
        return max(live, key=lambda holder: holder.place, default=None)
