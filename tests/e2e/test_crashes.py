"""A worker is stopped in mid-stream, given up, and wakes; and Redis loses everything: clients see
only a pause, and no process ends. (`tests/chaos` has every other fault.)"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.asyncio import Redis

from blockstore.records import PoolStats
from blockstore.redis.keys import pool_tag
from blockstore.redis_store import RedisStore
from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Sampling
from services.pool.directory import PoolDirectory, pool_directories
from tests.waiting import until

from .decoders import living
from .deployment import Deployment
from .quiet import is_quiet

MAX_TOKENS = 160
NUM_STREAMS = 12
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def deployment(pairs: Deployment) -> Deployment:
    """Its pool fits 12 streams of 15 blocks beside cached blocks."""
    return pairs


@dataclass
class Stream:
    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, client: AsyncClient) -> list[int]:
        async for delta in client.generate(self.prompt, self.sampling, timeout_s=LIMIT_S):
            self.tokens += delta.token_ids
            async with self.changed:
                self.changed.notify_all()
        return self.tokens

    async def reaches(self, num_tokens: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.tokens) >= num_tokens)


def streams(seed: int) -> list[Stream]:
    """Half of the streams are greedy, half sampled; of each three, two share a prefix of two
    blocks."""
    chance = random.Random(seed)
    shared = [chance.randrange(259, 384) for _ in range(32)]
    return [
        Stream(
            [*(shared if number % 3 else ()), *(chance.randrange(259, 384) for _ in range(20))],
            Sampling(
                temperature=float(number % 2), seed=number, max_tokens=MAX_TOKENS, ignore_eos=True
            ),
        )
        for number in range(NUM_STREAMS)
    ]


async def streams_while(
    condition: Callable[[], Awaitable[object]], client: AsyncClient, seed: int
) -> asyncio.Future[list[list[int]]]:
    """Streams that run when `condition` was just true. Streams that ended before that are run
    again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            running = asyncio.gather(*(stream.run(client) for stream in streams(seed)))
            while not running.done():
                if await condition():
                    return running
                await asyncio.sleep(0.005)
            await running


async def all_serve(client: AsyncClient) -> None:
    """Wait until two workers of each kind serve, nothing is held and the audit is clean."""
    await until(lambda: is_whole(client, prefill=2, decode=2), limit_s=LIMIT_S)


async def is_whole(client: AsyncClient, prefill: int, decode: int) -> bool:
    """Whether so many workers of each kind serve, nothing is held and the audit is clean."""
    try:
        workers = await living(client)
    except QuireError:  # the block manager is not back
        return False
    ready = [worker.role for worker in workers if worker.state == "serving"]
    if (ready.count("prefill"), ready.count("decode")) != (prefill, decode):
        return False
    return await is_quiet(client)


@dataclass
class PoolView:
    """The deployment's pool and ledger, as its own workers access them."""

    directory: PoolDirectory
    store: RedisStore

    @property
    def pool_id(self) -> str:
        return self.directory.pool_id

    async def stats(self) -> PoolStats:
        return await self.store.stats(self.pool_id)

    async def until(self, condition: Callable[[PoolStats], bool]) -> PoolStats:
        return await until(self.stats, condition, limit_s=LIMIT_S)

    async def both_decode(self) -> bool:
        """Whether two decode workers hold two sequences each."""
        holders = await self.store.holders(self.pool_id)
        running = Counter(h.worker_id for h in holders if h.worker_id.startswith("decode"))
        return len(running) == 2 and min(running.values()) >= 2

    async def held_by(self, worker_id: str) -> set[int]:
        tag = pool_tag(self.pool_id)
        found: set[int] = set()
        async with Redis(unix_socket_path=str(self._socket)) as redis:
            for holder in await self.store.holders(self.pool_id):
                if holder.worker_id == worker_id:
                    found |= {int(b) for b in await redis.hkeys(f"{tag}:held:{holder.holder_id}")}
        return found

    @property
    def _socket(self) -> Path:
        return self.directory.path.parent.parent / "redis.sock"

    def content(self, without: set[int]) -> dict[int, bytes]:
        """The KV of every block except those in `without`."""
        header = self.directory.read_header()
        size = header.layout.block_bytes
        arena = self.directory.kv.read_bytes()
        blocks = set(range(header.num_blocks)) - without
        return {block: arena[block * size : (block + 1) * size] for block in blocks}


@pytest.fixture
async def pool_view(deployment: Deployment) -> AsyncIterator[PoolView]:
    (run,) = (path for path in deployment.run_root.iterdir() if (path / "pools").is_dir())
    directory = next(d for d in pool_directories(run / "pools") if d.worker_ids())
    store = await RedisStore.connect(f"unix://{run / 'redis.sock'}")
    yield PoolView(directory, store)
    await store.close()


async def test_other_workers_never_read_writes_of_a_stopped_worker(
    deployment: Deployment, client: AsyncClient, pool_view: PoolView
) -> None:
    """A worker is stopped in a step and fenced, and its requests continue elsewhere. Other requests
    fill the rest of the pool, without the quarantined blocks. When the worker wakes, the KV of the
    others does not change, its blocks become free, and a new worker serves in its place."""
    await all_serve(client)
    undisturbed = await asyncio.gather(*(stream.run(client) for stream in streams(3)))
    running = await streams_while(pool_view.both_decode, client, seed=3)
    stopped = deployment.running("--role=decode")[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        async with asyncio.timeout(LIMIT_S):
            assert await running == undisturbed
        (worker_id,) = (
            await pool_view.until(lambda s: bool(s.fenced_worker_ids))
        ).fenced_worker_ids
        quarantined = await pool_view.held_by(worker_id)
        assert quarantined
        for seed in range(4, 8):  # each needs more than half of what there is
            await asyncio.gather(*(stream.run(client) for stream in streams(seed)))
        stats = await pool_view.until(lambda s: s.num_held == len(quarantined))
        assert stats.num_free <= NUM_STREAMS  # the last, half-filled block of each
        before = pool_view.content(without=quarantined)
    finally:
        os.kill(stopped, signal.SIGCONT)
    await pool_view.until(lambda s: worker_id not in s.worker_ids)
    assert stopped in deployment.running("--role=decode")
    assert "worker_given_up" in deployment.log.read_text()
    assert pool_view.content(without=quarantined) == before
    await all_serve(client)
    assert (await pool_view.stats()).num_held == 0


SERVICES = ("--role=prefill", "--role=decode", "services.gateway", "services.block_manager")


async def test_streams_go_on_and_no_process_ends_when_redis_loses_everything(
    deployment: Deployment, client: AsyncClient
) -> None:
    """The prefix cache survives, too."""
    await all_serve(client)
    undisturbed = await asyncio.gather(*(stream.run(client) for stream in streams(9)))
    before, disturbed = [deployment.running(name) for name in SERVICES], streams(9)
    running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await disturbed[0].reaches(20)
    for pid in deployment.running("valkey"):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*running) == undisturbed
    again = await client.complete(disturbed[0].prompt, Sampling(max_tokens=1), timeout_s=LIMIT_S)
    assert (again.usage.num_cached_tokens or 0) >= 16
    await all_serve(client)
    assert [deployment.running(name) for name in SERVICES] == before
