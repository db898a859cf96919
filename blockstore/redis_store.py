"""The block store in Redis: each operation is one call of a function in functions/*.lua."""

import asyncio
from collections.abc import Sequence
from itertools import chain

from blockstore.errors import (
    LedgerError,
    PoolGone,
    StoreLost,
    StoreUnavailable,
    UnknownWorker,
    WorkerFenced,
)
from blockstore.records import (
    Allocation,
    Asserted,
    Claim,
    Content,
    Extension,
    Grown,
    Growth,
    Heartbeat,
    PoolSpec,
    PrefixHash,
    Retained,
    Wait,
)
from blockstore.redis import keys
from blockstore.redis.calls import MAX_ANSWER_S
from blockstore.redis.connection import Argument
from blockstore.redis.held_blocks_mirror import HeldBlocksMirror
from blockstore.redis.reading import RedisReads
from blockstore.redis.replies import (
    claim,
    content_field,
    ids,
    names,
    pages_of,
)
from blockstore.store import FUNCTION_LIBRARY, MarkOwned, Recovery

RESTORE_PAGE = 1024
"""The blocks of one call of `restore`."""
_POLL_S = 0.02
"""How often a recovery checks whether other workers have reported."""


class RedisStore(RedisReads):
    """The block store in Redis; see `blockstore.store.BlockStore`. Besides the errors there, every
    method raises StoreUnavailable and StoreLost."""

    # Pools

    async def register_pool(self, spec: PoolSpec) -> None:
        self._link(spec.pool_id).library = FUNCTION_LIBRARY
        run_id = await self._mutate(
            "register_pool",
            spec.pool_id,
            spec.model,
            spec.fingerprint,
            spec.num_blocks,
            spec.block_size,
            spec.block_bytes,
            spec.watermark_blocks,
            await self._run_id_of(spec.pool_id),
        )
        self._join(spec.pool_id, run_id)
        await self._set_link.mutations.send("SADD", keys.POOLS, spec.pool_id)

    async def drop_pool(self, pool_id: str) -> None:
        self._link(pool_id).mirrors = None
        while await self._mutate("drop_pool", pool_id):
            pass
        await self._set_link.mutations.send("SREM", keys.POOLS, pool_id)

    async def pool_ids(self) -> tuple[str, ...]:
        names = await self._set_link.reads.send("SMEMBERS", keys.POOLS)
        return tuple(sorted(name.decode() for name in names))

    # Workers

    async def register_worker(
        self,
        spec: PoolSpec,
        worker_id: str,
        recovery: Recovery | None = None,
        mark_owned: MarkOwned | None = None,
        lease_ms: int = 0,
    ) -> None:
        run_id = await self._mutate(
            "register_worker",
            spec.pool_id,
            worker_id,
            spec.fingerprint,
            spec.num_blocks,
            spec.block_size,
            spec.block_bytes,
            lease_ms,
        )
        self._join(spec.pool_id, run_id)
        mirrors = self._link(spec.pool_id).mirrors
        assert mirrors is not None
        if all(joined.worker_id != worker_id for joined in mirrors):
            mirrors.append(HeldBlocksMirror(spec, worker_id, recovery, mark_owned))

    async def fence(self, pool_id: str, worker_id: str) -> None:
        await self._mutate("fence", pool_id, worker_id)

    async def leave(self, pool_id: str, worker_id: str) -> None:
        await self._mutate("leave", pool_id, worker_id)
        link = self._link(pool_id)
        left = [joined for joined in link.mirrors or () if joined.worker_id != worker_id]
        link.mirrors = left or None

    async def heartbeat(self, pool_id: str, worker_id: str) -> Heartbeat:
        self._keep_listed(pool_id)
        fenced, *demands = await self._read("heartbeat", pool_id, worker_id)
        return Heartbeat(fenced == 1, names(demands))

    async def reap(self, pool_id: str, worker_id: str) -> int:
        """Reap a worker; after a lost answer the returned number may be too low, but all holders
        are released."""
        num_released, is_more = 0, 1
        while is_more:
            num, is_more = await self._mutate("reap", pool_id, worker_id)
            num_released += num
        return num_released

    # Holders

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
        chains = (hashes, *branches)
        args: list[Argument] = [holder_id, worker_id, order, num_blocks]
        args += (" ".join(str(len(each)) for each in chains), *chain.from_iterable(chains))
        reply = await self._mutate(
            "allocate",
            pool_id,
            *args,
            about=(holder_id,),
            record=lambda mirror, reply: mirror.record_allocate(worker_id, holder_id, order, reply),
        )
        epoch, num_cached, runs, *blocks = reply
        return Allocation(holder_id, epoch, ids(blocks), num_cached, ids(runs.split()))

    async def withdraw(self, pool_id: str, holder_id: str) -> None:
        await self._mutate(
            "withdraw",
            pool_id,
            holder_id,
            about=(holder_id,),
            record=lambda mirror, reply: mirror.record_withdraw(holder_id, reply),
        )

    async def extend(self, pool_id: str, worker_id: str, growths: Sequence[Growth]) -> Extension:
        fields: list[Argument] = []
        for growth in growths:
            fields += (growth.holder_id, growth.epoch, growth.have, growth.total)
        about = {growth.holder_id for growth in growths}
        reply = await self._mutate(
            "extend",
            pool_id,
            worker_id,
            *fields,
            about=about,
            record=lambda mirror, reply: mirror.record_extend(growths, reply),
        )
        demands, *answers = reply
        grown = (
            Grown(growth.holder_id, ids(blocks), error.decode() or None)
            for growth, (error, *blocks) in zip(growths, answers, strict=True)
        )
        return Extension(tuple(grown), names(demands))

    async def commit(
        self, pool_id: str, holder_id: str, epoch: int, blocks: Sequence[tuple[int, PrefixHash]]
    ) -> tuple[bool, ...]:
        fields = (value for block in blocks for value in block)
        flags = await self._mutate("commit", pool_id, holder_id, epoch, *fields, about=(holder_id,))
        return tuple(flag == 1 for flag in flags)

    async def retract(self, pool_id: str, block_id: int, prefix_hash: PrefixHash) -> None:
        await self._mutate("retract", pool_id, block_id, prefix_hash, about=())

    async def detach(self, pool_id: str, holder_id: str, epoch: int) -> int:
        reply = await self._mutate(
            "detach",
            pool_id,
            holder_id,
            epoch,
            about=(holder_id,),
            record=lambda mirror, reply: mirror.record_detach(holder_id, epoch, reply),
        )
        return int(reply)

    async def claim(
        self,
        pool_id: str,
        holder_id: str,
        epoch: int,
        worker_id: str,
        block_ids: Sequence[int] = (),
    ) -> Claim:
        reply = await self._mutate(
            "claim",
            pool_id,
            holder_id,
            epoch,
            worker_id,
            *block_ids,
            about=(holder_id,),
            record=lambda mirror, reply: mirror.record_claim(worker_id, holder_id, reply),
        )
        return claim(reply)

    async def give_back(
        self, pool_id: str, holder_id: str, epoch: int, block_ids: Sequence[int]
    ) -> None:
        await self._mutate(
            "give_back",
            pool_id,
            holder_id,
            epoch,
            *block_ids,
            about=(holder_id,),
            record=lambda mirror, reply: mirror.record_give_back(holder_id, block_ids, reply),
        )

    async def release(
        self, pool_id: str, holder_id: str, epoch: int, comes_back: bool = False
    ) -> None:
        await self._mutate(
            "release",
            pool_id,
            holder_id,
            epoch,
            int(comes_back),
            about=(holder_id,),
            record=lambda mirror, reply: mirror.record_release(holder_id, epoch, comes_back, reply),
        )

    # Retention

    async def retain(
        self,
        pool_id: str,
        owner: str,
        name: str,
        ttl_ms: int,
        hashes: Sequence[PrefixHash],
        limits: tuple[int, int],
    ) -> Retained:
        if not await self._retains(pool_id):
            raise StoreUnavailable(f"pool {pool_id} has functions without retention")
        args: list[Argument] = [owner, name, ttl_ms, *limits, *hashes]
        return Retained(*await self._mutate("retain", pool_id, *args))

    async def end_retention(self, pool_id: str, owner: str, name: str) -> bool:
        if not await self._retains(pool_id):
            return False
        return bool(await self._mutate("end_retention", pool_id, owner, name))

    # Recovery

    async def recover_pool(
        self, spec: PoolSpec, ledger_epoch: int, worker_ids: Sequence[str]
    ) -> None:
        await self._mutate(
            "recover",
            spec.pool_id,
            ledger_epoch,
            await self._run_id_of(spec.pool_id),
            spec.model,
            spec.fingerprint,
            spec.num_blocks,
            spec.block_size,
            spec.block_bytes,
            spec.watermark_blocks,
            *worker_ids,
        )
        await self._set_link.mutations.send("SADD", keys.POOLS, spec.pool_id)
        # Also workers that make no calls now must notice the loss, and that they are missing.
        announcement = "SPUBLISH", keys.room_channel(spec.pool_id), ""
        await self._link(spec.pool_id).mutations.send(*announcement)

    async def reassert(
        self, spec: PoolSpec, worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
    ) -> tuple[str, ...]:
        for page in pages_of(worker_id, holders, waits):
            missing = await self._mutate("reassert", spec.pool_id, *page)
        return names(missing)

    async def restore(self, pool_id: str, first: int, contents: Sequence[Content]) -> None:
        for start in range(0, len(contents), RESTORE_PAGE):
            page = contents[start : start + RESTORE_PAGE]
            fields = (field for content in page for field in (content_field(content), content.rank))
            await self._mutate("restore", pool_id, first + start, *fields)

    async def reopen(self, pool_id: str) -> None:
        await self._mutate("reopen", pool_id)

    # When the server has lost its data

    async def _renew(self, pool_id: str, run_id: str) -> None:
        """Report everything that this store's workers hold of a pool, and wait until the pool is
        rebuilt. After StoreUnavailable it is called again. Raises StoreLost or PoolGone if a
        recovery is impossible, and WorkerFenced or UnknownWorker if a worker of this store was
        fenced or reaped meanwhile."""
        link = self._link(pool_id)
        if not link.recoverable:
            raise link.server.mark_lost("it was restarted, or replaced by another one")
        fresh = self._single_use(self._url, MAX_ANSWER_S)
        try:
            fresh_run_id = await fresh._run_id_of(pool_id)
            members = list(link.mirrors or ())
            for mirror in members:  # all, before waiting for other processes, which wait, too
                await _report_to(fresh, fresh_run_id, mirror)
            for mirror in members:
                await _until_whole(fresh, mirror)
        except (WorkerFenced, UnknownWorker, PoolGone):
            raise
        except (LedgerError, StoreLost) as error:  # lost again, or another process went on
            raise StoreUnavailable(f"{link.server.url}: {error}") from error
        finally:
            await fresh.close()


async def _report_to(fresh: RedisStore, run_id: str, mirror: HeldBlocksMirror) -> None:
    assert mirror.recovery is not None
    await mirror.recovery.begin(fresh, run_id)
    await fresh.reassert(mirror.spec, mirror.worker_id, *mirror.report())


async def _until_whole(fresh: RedisStore, mirror: HeldBlocksMirror) -> None:
    assert mirror.recovery is not None
    while (stats := await fresh.stats(mirror.spec.pool_id)).recovering:
        if mirror.worker_id in stats.missing_worker_ids:
            raise StoreUnavailable("it was lost again")
        if stats.missing_worker_ids:
            await asyncio.sleep(_POLL_S)
        else:
            await mirror.recovery.finish(fresh)
