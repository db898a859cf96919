"""The ledger of one pool in memory: its holders, blocks, prefix index and waiters.

The ledger implements the contract of `blockstore.store` in plain, synchronous Python. `MemoryStore`
keeps one for each pool; the explorer in tests/model_checking copies it to visit all its states.
Every method checks everything before it changes anything, so that an error leaves the ledger as it
was (except for the waiter that a refused `allocate` leaves).
"""

from collections.abc import Sequence
from math import inf

from blockstore.errors import (
    LeaseHeld,
    NotHeld,
    OutOfBlocks,
    StaleHolder,
    UnknownWorker,
    WorkerFenced,
    WorkerNotEmpty,
)
from blockstore.memory.arguments import check, check_prefix, check_same_pool
from blockstore.memory.holders import Holder
from blockstore.memory.ledger_state import LedgerState
from blockstore.memory.rebuilding import quarantine_of
from blockstore.memory.waiters import Waiter
from blockstore.records import (
    Allocation,
    Asserted,
    BlockInfo,
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
    Retained,
    Retention,
    Wait,
)
from blockstore.store import QUARANTINE


class Ledger(LedgerState):
    """The ledger of one pool, with the methods and errors of `BlockStore`, without the pool_id."""

    # Workers

    def register_worker(self, spec: PoolSpec, worker_id: str, lease_ms: int = 0) -> None:
        check(spec=spec, worker_id=worker_id, lease_ms=lease_ms)
        if self.reaped.epoch(worker_id) is not None:
            raise UnknownWorker(f"worker {worker_id} was reaped; names are never reused")
        if self.workers.get(worker_id):
            raise WorkerFenced(f"worker {worker_id} is fenced")
        check_same_pool(self.spec, spec, worker_id)
        self.workers[worker_id] = False
        self.rebuilding.missing.discard(worker_id)
        if lease_ms:
            self.leases[worker_id] = self.clock() + lease_ms / 1000

    def fence(self, worker_id: str) -> None:
        self._require_known(worker_id)
        self.workers[worker_id] = True
        self.waiters.remove_worker(worker_id)
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
        self.leases.pop(worker_id, None)
        self.rebuilding.missing.discard(worker_id)

    def heartbeat(self, worker_id: str) -> Heartbeat:
        self._require_known(worker_id)
        self.rebuilding.require_reported(worker_id)
        return Heartbeat(self.workers[worker_id], self._demands_of(worker_id))

    def reap(self, worker_id: str) -> int:
        check(worker_id=worker_id)
        if (left_s := self.leases.get(worker_id, -inf) - self.clock()) > 0:
            raise LeaseHeld(f"{worker_id} may hold blocks for {left_s * 1e3:.0f} ms")
        self.leases.pop(worker_id, None)
        dead = self.holders.of(worker_id)
        for holder in reversed(dead):
            self._end(holder)
        self.waiters.remove_worker(worker_id)
        self.workers.pop(worker_id, None)
        self.rebuilding.missing.discard(worker_id)
        self.reaped.add(worker_id)
        return len(dead)

    # Recovery

    def reassert(
        self, worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
    ) -> tuple[str, ...]:
        if self.reaped.epoch(worker_id) is not None:
            raise UnknownWorker(f"worker {worker_id} was reaped; names are never reused")
        if self.rebuilding.is_over:
            self._require_live(worker_id)
            return ()
        if self.workers.setdefault(worker_id, False):
            raise WorkerFenced(f"worker {worker_id} is fenced")
        for asserted in holders:
            known = self.holders.get(asserted.holder_id)
            holder = self.rebuilding.accept_report(known, asserted, worker_id)
            if holder is not None:
                if known is not None:
                    self._drop(known, set(known.held))
                self.blocks.share(sorted(holder.held), holder.holder_id)
                self.blocks.payers |= dict.fromkeys(holder.held, holder.tenant)
                self.holders[holder.holder_id] = holder
        for wait in waits:
            self.waiters[wait.holder_id] = Waiter(wait.order, worker_id)
            if wait.released_epoch:
                self.released.add(wait.holder_id, wait.released_epoch)
        self.rebuilding.missing.discard(worker_id)
        return tuple(sorted(self.rebuilding.missing))

    def restore(self, first: int, contents: Sequence[Content]) -> None:
        if not self.rebuilding.is_over:
            self.rebuilding.require_all_reported()
            self.rebuilding.restore(self.blocks, self._quarantines, first, contents)

    def reopen(self) -> None:
        if not self.rebuilding.is_over:
            self.rebuilding.require_all_reported()
            self.rebuilding.end(self.blocks)
            if not self._quarantines:
                self.blocks.payers = {}

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
        self._require_live(worker_id)
        if self.released.epoch(holder_id) is not None:
            raise StaleHolder(f"{holder_id} was released")
        holder = self.holders.get(holder_id)
        if holder is None:
            self.waiters.remove_returning(order, self.released)
            hits, runs = self.blocks.find_hits(hashes, branches)
            self._check_admission(holder_id, Waiter(order, worker_id), hits, num_blocks)
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
        self._require_live(worker_id)
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
        holder = self._require_unfenced(holder_id)
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
        holder = self._require_unfenced(holder_id)
        sent_again = epoch % 2 == 1 and holder.epoch == epoch + 1
        if not sent_again:
            holder.require(epoch)
            if epoch % 2 == 0:
                raise StaleHolder(f"{holder_id} is detached at epoch {epoch}")
            holder.epoch += 1
        return holder.epoch

    def claim(
        self, holder_id: str, epoch: int, worker_id: str, block_ids: Sequence[int] = ()
    ) -> Claim:
        check(holder_id=holder_id, worker_id=worker_id, epoch=epoch, block_ids=block_ids)
        self.rebuilding.require_over()
        self._require_live(worker_id)
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

    # Retention

    def retain(
        self,
        owner: str,
        name: str,
        ttl_ms: int,
        hashes: Sequence[PrefixHash],
        limits: tuple[int, int],
    ) -> Retained:
        check(owner=owner, name=name, ttl_ms=ttl_ms, chain=hashes, block_ids=limits)
        self.rebuilding.require_over()
        return self.retentions.retain(self.blocks, (owner, name), ttl_ms, limits, hashes)

    def end_retention(self, owner: str, name: str) -> bool:
        check(owner=owner, name=name)
        self.rebuilding.require_over()
        return self.retentions.end(self.blocks, (owner, name))

    # Reading

    def match(self, hashes: Sequence[PrefixHash]) -> int:
        check(hashes=hashes)
        return len(self.blocks.hits(hashes))

    def holder_infos(self) -> tuple[HolderInfo, ...]:
        self.rebuilding.require_over()
        return tuple(h.info() for h in sorted(self.holders.values(), key=lambda h: h.sort_key))

    def held_blocks(self, holder_id: str) -> frozenset[int]:
        holder = self.holders.get(holder_id)
        return frozenset(holder.held) if holder else frozenset()

    def block_infos(self, block_ids: Sequence[int]) -> tuple[BlockInfo, ...]:
        blocks = self.blocks
        ranks = {block_id: rank for rank, block_id in enumerate((*blocks.cached, *blocks.kept))}
        return tuple(
            BlockInfo(each, blocks.refs.get(each, 0), blocks.hash_of.get(each), ranks.get(each))
            for each in block_ids
        )

    def retention_records(self, with_hashes: bool = False) -> tuple[Retention, ...]:
        return self.retentions.records(self.blocks, with_hashes)

    def stats(self) -> PoolStats:
        return PoolStats(
            spec=self.spec,
            num_free=self._num_free,
            num_cached=self.blocks.num_cached,
            num_held=len(self.blocks.refs),
            num_holders=len(self.holders),
            num_waiters=len(self.waiters),
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            num_retained=len(self.blocks.retained),
            worker_ids=tuple(sorted(self.workers)),
            fenced_worker_ids=tuple(sorted(w for w, fenced in self.workers.items() if fenced)),
            ledger_epoch=self.ledger_epoch,
            recovering=not self.rebuilding.is_over,
            missing_worker_ids=tuple(sorted(self.rebuilding.missing)),
            num_accounted=self.blocks.next_unused,
            num_to_account=self.rebuilding.top,
            shares=self.blocks.shares.records(),
        )

    @property
    def _quarantines(self) -> list[Holder]:
        return [h for key, h in self.holders.items() if key.startswith(QUARANTINE)]

    @property
    def _num_free(self) -> int:
        return self.blocks.num_free if self.rebuilding.is_over else len(self.blocks.returned)
