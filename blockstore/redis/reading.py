"""The part of `RedisStore` that reads."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from blockstore.errors import UnknownPool
from blockstore.records import (
    AuditReport,
    BlockInfo,
    HolderInfo,
    PoolStats,
    PrefixHash,
    Retention,
)
from blockstore.redis import keys
from blockstore.redis.audit import audit_pool, counters_only
from blockstore.redis.calls import RedisCalls
from blockstore.redis.replies import holder_info, ids, pool_stats, retention
from blockstore.store import FUNCTION_LIBRARY

HOLDER_PAGE = 1000
RETENTION_PAGE = 16
"""The retentions of one call that lists them; each may have thousands of hashes."""
OBSERVER_PAGE = 512
"""The blocks of one command that reads them for an observer: well below a millisecond."""


class RedisReads(RedisCalls):
    """The operations that change nothing."""

    async def match(self, pool_id: str, hashes: Sequence[PrefixHash]) -> int:
        return int(await self._read("match", pool_id, *hashes))

    async def holders(self, pool_id: str) -> tuple[HolderInfo, ...]:
        """Return all holders, in order; atomic up to `HOLDER_PAGE` holders."""
        infos: list[HolderInfo] = []
        page = [None] * HOLDER_PAGE
        while len(page) == HOLDER_PAGE:
            page = await self._read("holders", pool_id, len(infos), HOLDER_PAGE)
            infos.extend(map(holder_info, page))
        return tuple(sorted(infos, key=lambda info: (info.order, info.holder_id)))

    async def holder_page(self, pool_id: str, first: int, limit: int) -> tuple[HolderInfo, ...]:
        page = await self._read("holders", pool_id, first, limit)
        return tuple(map(holder_info, page))

    async def held_blocks(self, pool_id: str, holder_id: str) -> frozenset[int]:
        reads = self._link(pool_id).reads
        return frozenset(ids(await reads.send("HKEYS", keys.held(pool_id, holder_id))))

    async def block_infos(self, pool_id: str, block_ids: Sequence[int]) -> tuple[BlockInfo, ...]:
        pages = range(0, len(block_ids), OBSERVER_PAGE)
        infos = [await self._infos(pool_id, block_ids[at : at + OBSERVER_PAGE]) for at in pages]
        return tuple(chain.from_iterable(infos))

    async def _infos(self, pool_id: str, block_ids: Sequence[int]) -> Iterator[BlockInfo]:
        reads = self._link(pool_id).reads
        refs, hashes, clocks, kept = await asyncio.gather(
            reads.send("HMGET", keys.refs(pool_id), *block_ids),
            reads.send("HMGET", keys.hashes(pool_id), *block_ids),
            reads.send("ZMSCORE", keys.cached(pool_id), *block_ids),
            reads.send("ZMSCORE", keys.kept(pool_id), *block_ids),
        )
        at = [one if other is None else other for one, other in zip(clocks, kept, strict=True)]
        return (
            BlockInfo(block_id, int(held or 0), carried, None if clock is None else int(clock))
            for block_id, held, carried, clock in zip(block_ids, refs, hashes, at, strict=True)
        )

    async def stats(self, pool_id: str) -> PoolStats:
        """Return a pool's counters. Raises UnknownPool also for a pool that a restarted server read
        from a file."""
        stats, run_id = pool_stats(pool_id, await self._read("stats", pool_id))
        if run_id != self._link(pool_id).server.run_id:
            raise UnknownPool(f"pool {pool_id} is older than the server's restart")
        return stats

    async def audit(self, pool_id: str) -> AuditReport:
        async def read(*parts: str | int) -> list[Any]:
            return list(await self._read("ledger", pool_id, *parts))

        stats = await self.stats(pool_id)
        if await self._library(pool_id) != FUNCTION_LIBRARY:
            return counters_only(stats)
        return await audit_pool(stats, read)

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        link = self._link(pool_id)

        async def require_pool() -> None:
            if await link.reads.send("EXISTS", keys.pool_header(pool_id)):
                return
            if link.mirrors is None:
                raise UnknownPool(f"pool {pool_id} is not there")
            if not link.recoverable:
                raise link.server.mark_lost(f"pool {pool_id} is gone")
            link.server.mark_in_doubt()

        await link.free_block_notifier.wait(keys.room_channel(pool_id), timeout_s, require_pool)

    async def retentions(self, pool_id: str, with_hashes: bool = False) -> tuple[Retention, ...]:
        if not await self._retains(pool_id):
            return ()
        rows = await self._retention_pages("retentions", pool_id)
        parts = await self._retention_pages("ledger", pool_id, "retentions") if with_hashes else []
        hashes = {key: tuple(flat[::2]) for key, *flat in parts}
        found = (retention(row, hashes) for row in rows)
        return tuple(sorted(found, key=lambda each: (each.owner, each.name)))

    async def _retention_pages(self, function: str, pool_id: str, *parts: str) -> list[Any]:
        """Read all retentions with a function that returns them in pages, last in its answer."""
        rows: list[Any] = []
        page = [None] * RETENTION_PAGE
        while len(page) == RETENTION_PAGE:
            reply = await self._read(function, pool_id, *parts, len(rows), RETENTION_PAGE)
            page = reply[-1] if parts else reply
            rows.extend(page)
        return rows

    async def _retains(self, pool_id: str) -> bool:
        """Whether the pool's functions know retention; the library before this one does not."""
        return await self._library(pool_id) == FUNCTION_LIBRARY
