"""Workers on a pool without engines: their locks, their stores and the pool's stamps."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from blockstore.records import Asserted, Growth
from blockstore.redis_store import RedisStore
from services.pool.directory import PoolDirectory, new_directory
from services.pool.header import PoolHeader
from services.pool.layout import PoolLayout
from services.pool.locks import WorkerLock
from services.pool.recovery import PoolRecovery
from services.pool.stamps import Stamps, record_bytes

NUM_BLOCKS, SIZE, LIMIT_S = 24, 4, 10.0
LAYOUT = PoolLayout("model", "fingerprint", 1, 1, 4, "float32", SIZE)


def make_directory(root: Path, pool_id: str = "pool") -> PoolDirectory:
    with new_directory(root, pool_id) as made:
        made.stamps.write_bytes(bytes(NUM_BLOCKS * record_bytes(SIZE)))
        PoolHeader(pool_id, "", LAYOUT, NUM_BLOCKS, 0).write(made.header)
    return PoolDirectory(root / pool_id)


class Worker:
    """A worker's lock, store and stamps."""

    def __init__(
        self, name: str, url: str, directory: PoolDirectory, store: RedisStore, stamps: Stamps
    ) -> None:
        self.name = name
        self.pool_id = directory.pool_id
        self.store = store
        self.url = url
        self.lock = WorkerLock.create(directory.lock_path(name))
        self.stamps = stamps
        self.beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Send heartbeats, from which an idle worker learns of a lost ledger."""
        while True:
            await asyncio.sleep(0.02)
            await self.store.heartbeat(self.pool_id, self.name)

    async def allocate(self, holder: str, order: int, num_blocks: int) -> tuple[int, ...]:
        """Allocate blocks and stamp them as its own."""
        found = await self.store.allocate(self.pool_id, holder, self.name, order, [], num_blocks)
        return found.block_ids

    async def grow(self, holder: str, epoch: int, have: int, total: int) -> tuple[int, ...]:
        growth = Growth(holder, epoch, have, total)
        (grown,) = (await self.store.extend(self.pool_id, self.name, [growth])).grown
        assert grown.error is None
        return grown.block_ids


def _own(stamps: Stamps, holder: str, block_ids: Sequence[int]) -> None:
    stamps.mark_owned(block_ids, holder)


@asynccontextmanager
async def joined(url: str, directory: PoolDirectory, *names: str) -> AsyncIterator[list[Worker]]:
    workers = []
    for name in names:
        store = await RedisStore.connect(url, retry_for_s=math.inf)
        spec = directory.read_header().spec
        await store.register_pool(spec)
        stamps = Stamps(directory.stamps, NUM_BLOCKS, SIZE)
        recovery, own = PoolRecovery(directory), partial(_own, stamps)
        await store.register_worker(spec, name, recovery, own)
        workers.append(Worker(name, url, directory, store, stamps))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield workers
    finally:
        for worker in workers:
            worker.beating.cancel()
            await worker.store.close()
            worker.stamps.close()
            worker.lock.close()


async def assert_whole(workers: list[Worker]) -> None:
    """The ledger is clean, and agrees with the workers about their holders (an issuer may not know
    of a claim yet)."""
    known: dict[str, Asserted] = {}
    pool_id = workers[0].pool_id
    for worker in workers:
        mirrors = worker.store._link(pool_id).mirrors
        assert mirrors is not None
        for held in mirrors[0].report()[0]:
            if held.holder_id not in known or known[held.holder_id].epoch < held.epoch:
                known[held.holder_id] = held
    store = await RedisStore.connect(workers[0].url)
    found = {h.holder_id: (h.epoch, h.num_blocks) for h in await store.holders(pool_id)}
    report = await store.audit(pool_id)
    await store.close()
    assert found == {key: (held.epoch, len(held.block_ids)) for key, held in known.items()}
    assert report.ledger_checked
    assert report.violations == ()
