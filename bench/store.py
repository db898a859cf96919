"""Measures the block store's calls, at several sizes of the pool and of the call.

    python -m bench.store [--pools 1000 100000 1000000] [--blocks 1 64] [--calls 500]

On a Valkey of its own, on a Unix socket. Each pool is filled first: half of
its blocks are held, the other half cached. Then requests are made, round after round: each
allocates with hashes that nobody has cached, extends by as many blocks, commits what it allocated
and releases all. Of the new blocks half were given back by the round before, half are evicted.
Prints a markdown table:

    callers   at once on one store, as far as the pool has room
    calls/s   of all callers together
    p50, p99  ms as a single caller sees them
    CPU       us of the server's main thread per call, by its own account: what is left of a busy
              machine's noise; its inverse is what one server can do at most
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles

import redis.asyncio
import xxhash

from bench.harness import options, table_head, table_row
from blockstore.records import Growth, PoolSpec
from blockstore.redis_store import RedisStore
from tests.conftest import Valkey

MAX_CALLERS = 64
WORKER = "bench"
OPERATIONS = ("allocate", "extend", "commit", "release")
FILL_BLOCKS = 1000
HEADER = ("operation", "pool blocks", "blocks a call", "callers")
FIGURES = ("calls/s", "p50, ms", "p99, ms", "CPU, us")


@dataclass
class Figures:
    """The figures of one operation."""

    latencies_s: list[float] = field(default_factory=list)
    server_cpu_s: float = 0.0
    num_concurrent: int = 0
    concurrent_s: float = 0.0

    def cells(self) -> list[str]:
        cuts = quantiles(self.latencies_s, n=100)
        return [
            f"{self.num_concurrent / self.concurrent_s:,.0f}",
            f"{cuts[49] * 1000:.2f}",
            f"{cuts[98] * 1000:.2f}",
            f"{self.server_cpu_s / len(self.latencies_s) * 1e6:.0f}",
        ]


class Requests:
    """Makes requests of `size` blocks that are allocated, extended, committed and released."""

    def __init__(self, store: RedisStore, pool_id: str, size: int) -> None:
        self._store = store
        self._pool_id = pool_id
        self._size = size
        self._numbers = count()
        self._blocks: dict[str, tuple[int, ...]] = {}

    def new(self) -> str:
        return f"{self._size}/{next(self._numbers)}"

    def call(self, operation: str, holder_id: str) -> Awaitable[None]:
        method: Callable[[str], Awaitable[None]] = getattr(self, f"_{operation}")
        return method(holder_id)

    async def _allocate(self, holder_id: str) -> None:
        hashes = _hashes(holder_id, self._size)
        allocation = await self._store.allocate(
            self._pool_id, holder_id, WORKER, 1, hashes, self._size
        )
        self._blocks[holder_id] = allocation.block_ids

    async def _extend(self, holder_id: str) -> None:
        growth = Growth(holder_id, 1, self._size, 2 * self._size)
        extension = await self._store.extend(self._pool_id, WORKER, [growth])
        if len(extension.grown[0].block_ids) != self._size:
            raise RuntimeError(f"the pool is too small for this run: {extension.grown[0].error}")

    async def _commit(self, holder_id: str) -> None:
        blocks = list(zip(self._blocks[holder_id], _hashes(holder_id, self._size), strict=True))
        await self._store.commit(self._pool_id, holder_id, 1, blocks)

    async def _release(self, holder_id: str) -> None:
        await self._store.release(self._pool_id, holder_id, 1)
        del self._blocks[holder_id]


def _hashes(seed: str, num: int) -> list[bytes]:
    return [xxhash.xxh3_128_digest(f"{seed}/{number}".encode()) for number in range(num)]


async def fill(store: RedisStore, spec: PoolSpec) -> None:
    """Half of the blocks held, the other half cached, all of them committed."""
    per_holder = min(FILL_BLOCKS, spec.num_blocks // 4)
    num_holders = spec.num_blocks // per_holder
    for number in range(num_holders):
        holder_id = f"fill{number}"
        hashes = _hashes(holder_id, per_holder)
        allocation = await store.allocate(spec.pool_id, holder_id, WORKER, 1, hashes, per_holder)
        blocks = list(zip(allocation.block_ids, hashes, strict=True))
        await store.commit(spec.pool_id, holder_id, 1, blocks)
    for number in range(num_holders // 2):
        await store.release(spec.pool_id, f"fill{number}", 1)


async def cpu_s(server: redis.asyncio.Redis) -> float:
    """CPU time of the server's main thread so far."""
    info = await server.info("cpu")
    return float(info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])


async def one_by_one(
    requests: Requests, server: redis.asyncio.Redis, num_callers: int, figures: dict[str, Figures]
) -> None:
    """The requests of one round by a single caller."""
    holder_ids = [requests.new() for _ in range(num_callers)]
    for operation in OPERATIONS:
        cpu_before_s = await cpu_s(server)
        for holder_id in holder_ids:
            start = time.perf_counter()
            await requests.call(operation, holder_id)
            figures[operation].latencies_s.append(time.perf_counter() - start)
        figures[operation].server_cpu_s += await cpu_s(server) - cpu_before_s


async def all_at_once(requests: Requests, num_callers: int, figures: dict[str, Figures]) -> None:
    """The requests of one round, each by a caller of its own."""
    holder_ids = [requests.new() for _ in range(num_callers)]
    for operation in OPERATIONS:
        start = time.perf_counter()
        await asyncio.gather(*(requests.call(operation, h) for h in holder_ids))
        figures[operation].concurrent_s += time.perf_counter() - start
        figures[operation].num_concurrent += num_callers


async def measure(
    store: RedisStore, server: redis.asyncio.Redis, spec: PoolSpec, size: int, num_calls: int
) -> None:
    """Print the rows of one size of pool and call. A request holds 2 * size blocks at its end, and
    all of a round fit into the cached half."""
    num_callers = min(MAX_CALLERS, spec.num_blocks // 2 // (2 * size))
    requests = Requests(store, spec.pool_id, size)
    figures = {operation: Figures() for operation in OPERATIONS}
    for _ in range(-(-num_calls // num_callers)):
        await one_by_one(requests, server, num_callers, figures)
        await all_at_once(requests, num_callers, figures)
    for operation in OPERATIONS:
        head = [operation, f"{spec.num_blocks:,}", str(size), str(num_callers)]
        print(table_row(head + figures[operation].cells()), flush=True)


@dataclass(frozen=True)
class Options:
    pools: tuple[int, ...] = (1000, 100_000, 1_000_000)
    blocks: tuple[int, ...] = (1, 64)
    """The number of blocks of a call."""
    calls: int = 500
    """The number of calls of each operation, each way."""


async def run(url: str, asked: Options) -> None:
    store = await RedisStore.connect(url)
    server = redis.asyncio.Redis.from_url(url)
    print(table_head([*HEADER, *FIGURES]))
    for num_blocks in asked.pools:
        spec = PoolSpec(f"bench-{num_blocks}", "bench", "bench", num_blocks, 16, 1)
        await store.register_pool(spec)
        await store.register_worker(spec, WORKER)
        await fill(store, spec)
        for size in asked.blocks:
            await measure(store, server, spec, size, asked.calls)
        await store.drop_pool(spec.pool_id)
    await server.aclose()
    await store.close()


def main() -> None:
    asked = options(Options, __doc__)
    with tempfile.TemporaryDirectory() as directory:
        server = Valkey(Path(directory))
        server.start()
        try:
            asyncio.run(run(server.url, asked))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
