"""`BlockStore` in plain Python: one `Ledger` for each pool, in one process.

The unit tests use it as a fake; the property tests compare the server with it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from blockstore.errors import PoolExists, UnknownPool
from blockstore.memory.arguments import check
from blockstore.memory.ledger import Ledger
from blockstore.memory.recount import audit
from blockstore.records import (
    Allocation,
    Asserted,
    AuditReport,
    BlockInfo,
    Claim,
    Content,
    Extension,
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
from blockstore.store import MarkOwned, Recovery


class MemoryStore:
    """Keeps all pools of one process. `clock` returns seconds from any start; only the age of
    tombstones and the end of leases depend on it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        make_ledger: Callable[[PoolSpec, Callable[[], float]], Ledger] = Ledger,
    ) -> None:
        self._clock = clock
        self._make_ledger = make_ledger
        self._ledgers: dict[str, Ledger] = {}
        self._mark_owned: dict[tuple[str, str], MarkOwned] = {}  # by (pool, worker)
        self._room: dict[str, asyncio.Event] = {}  # by pool; set when blocks are freed

    async def register_pool(self, spec: PoolSpec) -> None:
        check(pool_id=spec.pool_id, spec=spec)
        ledger = self._ledgers.setdefault(spec.pool_id, self._make_ledger(spec, self._clock))
        if ledger.spec != spec:
            raise PoolExists(f"pool {spec.pool_id} exists as {ledger.spec}")

    async def drop_pool(self, pool_id: str) -> None:
        check(pool_id=pool_id)
        self._ledgers.pop(pool_id, None)

    async def pool_ids(self) -> tuple[str, ...]:
        return tuple(sorted(self._ledgers))

    async def register_worker(
        self,
        spec: PoolSpec,
        worker_id: str,
        recovery: Recovery | None = None,
        mark_owned: MarkOwned | None = None,
        lease_ms: int = 0,
    ) -> None:
        self.ledger(spec.pool_id).register_worker(spec, worker_id, lease_ms)
        if mark_owned is not None:
            self._mark_owned[spec.pool_id, worker_id] = mark_owned

    async def fence(self, pool_id: str, worker_id: str) -> None:
        self.ledger(pool_id).fence(worker_id)

    async def leave(self, pool_id: str, worker_id: str) -> None:
        self.ledger(pool_id).leave(worker_id)

    async def heartbeat(self, pool_id: str, worker_id: str) -> Heartbeat:
        return self.ledger(pool_id).heartbeat(worker_id)

    async def allocate(
        self,
        pool_id: str,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        ledger = self.ledger(pool_id)
        is_new = holder_id not in ledger.holders
        found = ledger.allocate(holder_id, worker_id, order, hashes, num_blocks, branches)
        if is_new:
            self._mark(pool_id, worker_id, holder_id, found.block_ids[found.num_cached_blocks :])
        return found

    async def withdraw(self, pool_id: str, holder_id: str) -> None:
        self.ledger(pool_id).withdraw(holder_id)

    async def extend(self, pool_id: str, worker_id: str, growths: Sequence[Growth]) -> Extension:
        extension = self.ledger(pool_id).extend(worker_id, growths)
        for grown in extension.grown:
            self._mark(pool_id, worker_id, grown.holder_id, grown.block_ids)
        return extension

    async def commit(
        self, pool_id: str, holder_id: str, epoch: int, blocks: Sequence[tuple[int, PrefixHash]]
    ) -> tuple[bool, ...]:
        return self.ledger(pool_id).commit(holder_id, epoch, blocks)

    async def retract(self, pool_id: str, block_id: int, prefix_hash: PrefixHash) -> None:
        with self._freeing(pool_id) as ledger:
            ledger.retract(block_id, prefix_hash)

    async def detach(self, pool_id: str, holder_id: str, epoch: int) -> int:
        return self.ledger(pool_id).detach(holder_id, epoch)

    async def claim(
        self,
        pool_id: str,
        holder_id: str,
        epoch: int,
        worker_id: str,
        block_ids: Sequence[int] = (),
    ) -> Claim:
        return self.ledger(pool_id).claim(holder_id, epoch, worker_id, block_ids)

    async def give_back(
        self, pool_id: str, holder_id: str, epoch: int, block_ids: Sequence[int]
    ) -> None:
        with self._freeing(pool_id) as ledger:
            ledger.give_back(holder_id, epoch, block_ids)

    async def release(
        self, pool_id: str, holder_id: str, epoch: int, comes_back: bool = False
    ) -> None:
        with self._freeing(pool_id) as ledger:
            ledger.release(holder_id, epoch, comes_back)

    async def retain(
        self,
        pool_id: str,
        owner: str,
        name: str,
        ttl_ms: int,
        hashes: Sequence[PrefixHash],
        limits: tuple[int, int],
    ) -> Retained:
        return self.ledger(pool_id).retain(owner, name, ttl_ms, hashes, limits)

    async def end_retention(self, pool_id: str, owner: str, name: str) -> bool:
        return self.ledger(pool_id).end_retention(owner, name)

    async def retentions(self, pool_id: str, with_hashes: bool = False) -> tuple[Retention, ...]:
        ledger = self.ledger(pool_id)
        return ledger.retentions.records(ledger.blocks, with_hashes)

    async def match(self, pool_id: str, hashes: Sequence[PrefixHash]) -> int:
        return self.ledger(pool_id).match(hashes)

    async def holders(self, pool_id: str) -> tuple[HolderInfo, ...]:
        return self.ledger(pool_id).holder_infos()

    async def holder_page(self, pool_id: str, first: int, limit: int) -> tuple[HolderInfo, ...]:
        return self.ledger(pool_id).holder_infos()[first : first + limit]

    async def held_blocks(self, pool_id: str, holder_id: str) -> frozenset[int]:
        holder = self.ledger(pool_id).holders.get(holder_id)
        return frozenset(holder.held) if holder else frozenset()

    async def block_infos(self, pool_id: str, block_ids: Sequence[int]) -> tuple[BlockInfo, ...]:
        blocks = self.ledger(pool_id).blocks
        ranks = {block_id: rank for rank, block_id in enumerate((*blocks.cached, *blocks.kept))}
        return tuple(
            BlockInfo(each, blocks.refs.get(each, 0), blocks.hash_of.get(each), ranks.get(each))
            for each in block_ids
        )

    async def stats(self, pool_id: str) -> PoolStats:
        return self.ledger(pool_id).stats()

    async def reap(self, pool_id: str, worker_id: str) -> int:
        with self._freeing(pool_id) as ledger:
            return ledger.reap(worker_id)

    async def recover_pool(
        self, spec: PoolSpec, ledger_epoch: int, worker_ids: Sequence[str]
    ) -> None:
        made = Ledger(spec, self._clock, ledger_epoch, worker_ids)
        ledger = self._ledgers.setdefault(spec.pool_id, made)
        if (ledger.spec, ledger.ledger_epoch) != (spec, ledger_epoch):
            raise PoolExists(f"{spec.pool_id} is there at ledger epoch {ledger.ledger_epoch}")

    async def reassert(
        self, spec: PoolSpec, worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
    ) -> tuple[str, ...]:
        return self.ledger(spec.pool_id).reassert(worker_id, holders, waits)

    async def restore(self, pool_id: str, first: int, contents: Sequence[Content]) -> None:
        self.ledger(pool_id).restore(first, contents)

    async def reopen(self, pool_id: str) -> None:
        self.ledger(pool_id).reopen()

    async def audit(self, pool_id: str) -> AuditReport:
        return audit(self.ledger(pool_id))

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        self.ledger(pool_id)
        room = self._room.setdefault(pool_id, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await room.wait()

    async def close(self) -> None:
        """Nothing to close."""

    def _mark(self, pool_id: str, worker_id: str, holder_id: str, block_ids: Sequence[int]) -> None:
        if mark_owned := self._mark_owned.get((pool_id, worker_id)):
            mark_owned(holder_id, block_ids)

    def ledger(self, pool_id: str) -> Ledger:
        """Return the pool's ledger. Raises UnknownPool."""
        check(pool_id=pool_id)
        try:
            return self._ledgers[pool_id]
        except KeyError:
            raise UnknownPool(f"pool {pool_id} is not there") from None

    @contextmanager
    def _freeing(self, pool_id: str) -> Iterator[Ledger]:
        """Yield the pool's ledger, and end the waits for room if the block freed some."""
        ledger = self.ledger(pool_id)
        num_freed_before = ledger.blocks.num_freed
        yield ledger
        if ledger.blocks.num_freed != num_freed_before and pool_id in self._room:
            self._room.pop(pool_id).set()
