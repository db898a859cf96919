"""Retains prefixes again after a server has lost the ledger of their pool: the workers and stamps
that a ledger is rebuilt from know nothing of retentions."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from blockstore.records import PoolStats, Retention
from blockstore.store import BlockStore
from services.block_manager.rounds import Connection
from services.block_manager.survey import Survey
from services.runtime.logging import get_logger

log = get_logger(__name__)

_LEAST_PAUSE_S = 1.0
_MOST_SHARE = 0.02
"""Copying the retentions of a pool takes at most this share of the time."""
_NO_LIMITS = 2**31, 2**31
"""A prefix that is retained again was within its budgets before."""


@dataclass(frozen=True, slots=True)
class _Copy:
    ledger_epoch: int
    read_at: float
    next_at: float
    """When the retentions are to be copied again."""
    retentions: tuple[Retention, ...]

    def left_ms(self, each: Retention, now: float) -> int:
        return each.left_ms - round((now - self.read_at) * 1000)


class RetentionCopies:
    """Copies the retentions of all pools. A retention that is younger than the last copy is lost
    with the ledger; one that was dropped since then returns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._copies: dict[str, _Copy] = {}

    async def update(self, seen: Survey, connection: Connection) -> None:
        """Run one round. The copy of a pool that the store has lost is kept until its retentions
        have ended."""
        now = self._clock()
        for pool_id, stats in seen.pools.items():
            copy = self._copies.get(pool_id)
            if stats.recovering:
                continue
            if copy is not None and copy.ledger_epoch != stats.ledger_epoch:
                await self._retain_again(connection.store, pool_id, copy)
            elif copy is not None and now < copy.next_at:
                continue
            elif not stats.num_retained:
                self._copies[pool_id] = _Copy(stats.ledger_epoch, now, now, ())
                continue
            self._copies[pool_id] = await self._read(connection.store, pool_id, stats)
        for pool_id in self._copies.keys() - seen.pools.keys():
            copy = self._copies[pool_id]
            if all(copy.left_ms(each, now) <= 0 for each in copy.retentions):
                del self._copies[pool_id]

    async def _read(self, store: BlockStore, pool_id: str, stats: PoolStats) -> _Copy:
        began = self._clock()
        found = await store.retentions(pool_id, with_hashes=True)
        now = self._clock()
        next_at = now + max(_LEAST_PAUSE_S, (now - began) / _MOST_SHARE)
        return _Copy(stats.ledger_epoch, now, next_at, found)

    async def _retain_again(self, store: BlockStore, pool_id: str, copy: _Copy) -> None:
        """Retain what has not ended, unless a client was faster."""
        present = {(each.owner, each.name) for each in await store.retentions(pool_id)}
        num_blocks = 0
        for each in copy.retentions:
            left_ms = copy.left_ms(each, self._clock())
            if left_ms > 0 and each.hashes and (each.owner, each.name) not in present:
                what = each.owner, each.name, left_ms, each.hashes
                await store.retain(pool_id, *what, _NO_LIMITS)
                num_blocks += len(each.hashes)
        if num_blocks:
            log.warning("prefixes_retained_again", pool_id=pool_id, num_blocks=num_blocks)
