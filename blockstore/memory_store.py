"""`BlockStore` in plain Python: one `Ledger` for each pool, in one process.

The unit tests use it as a fake; the property tests compare the server with it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from blockstore.errors import PoolExists, UnknownPool
from blockstore.memory.arguments import check
from blockstore.memory.ledger import Ledger
from blockstore.memory.recount import audit
from blockstore.records import (
    Allocation,
    Asserted,
    AuditReport,
    Extension,
    Growth,
    HolderInfo,
    PoolSpec,
    PrefixHash,
    Wait,
)
from blockstore.store import MarkOwned, Recovery

P = ParamSpec("P")
T = TypeVar("T")


def _forwarded(
    operation: Callable[Concatenate[Ledger, P], T],
) -> Callable[Concatenate["MemoryStore", str, P], Coroutine[Any, Any, T]]:
    """Return the method that calls the operation of this name at a pool's ledger, and ends the
    waits for room if the operation has freed blocks."""

    @wraps(operation)
    async def method(self: "MemoryStore", pool_id: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        ledger = self.ledger(pool_id)
        num_freed_before = ledger.blocks.num_freed
        result: T = getattr(ledger, operation.__name__)(*args, **kwargs)
        if ledger.blocks.num_freed != num_freed_before and pool_id in self._room:
            self._room.pop(pool_id).set()
        return result

    return method


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

    fence = _forwarded(Ledger.fence)
    leave = _forwarded(Ledger.leave)
    heartbeat = _forwarded(Ledger.heartbeat)
    reap = _forwarded(Ledger.reap)

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

    async def extend(self, pool_id: str, worker_id: str, growths: Sequence[Growth]) -> Extension:
        extension = self.ledger(pool_id).extend(worker_id, growths)
        for grown in extension.grown:
            self._mark(pool_id, worker_id, grown.holder_id, grown.block_ids)
        return extension

    withdraw = _forwarded(Ledger.withdraw)
    commit = _forwarded(Ledger.commit)
    retract = _forwarded(Ledger.retract)
    detach = _forwarded(Ledger.detach)
    claim = _forwarded(Ledger.claim)
    give_back = _forwarded(Ledger.give_back)
    release = _forwarded(Ledger.release)
    retain = _forwarded(Ledger.retain)
    end_retention = _forwarded(Ledger.end_retention)
    retentions = _forwarded(Ledger.retention_records)
    match = _forwarded(Ledger.match)
    holders = _forwarded(Ledger.holder_infos)
    held_blocks = _forwarded(Ledger.held_blocks)
    block_infos = _forwarded(Ledger.block_infos)
    stats = _forwarded(Ledger.stats)
    restore = _forwarded(Ledger.restore)
    reopen = _forwarded(Ledger.reopen)

    async def audit(self, pool_id: str) -> AuditReport:
        return audit(self.ledger(pool_id))

    async def holder_page(self, pool_id: str, first: int, limit: int) -> tuple[HolderInfo, ...]:
        return self.ledger(pool_id).holder_infos()[first : first + limit]

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
