"""Measures what the dashboard's feed costs, by the size of the pool.

    python -m bench.dashboard [--pools 1000,65536,1000000] [--updates 40]

On a Valkey of its own. Each pool is filled first: half of its blocks are held, the other half
cached. The first updates read all blocks (`first look`, at two updates a second). Then, before each
update, a tenth of the pool's requests, but at most 8 with 250 blocks each, ends and as many begin:
up to 4,000 blocks a second. Prints a markdown table with the mean update, and the most:

    server     ms of Valkey's main thread, by its own account; and wall time of the longest call
    manager    ms of CPU of the block manager: reads the ledger, encodes what changed
    gateway    ms of CPU of the gateway: decodes, makes the patch for all viewers
    patch      KB that each viewer gets
    whole      KB of a viewer's first event
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from pydantic_core import to_json

from bench.store import WORKER, Requests, cpu_s, fill, own_server
from blockstore.memory_registry import MemoryRegistry
from blockstore.records import PoolSpec
from blockstore.redis_store import RedisStore
from quire.v1 import block_manager_pb2 as pb
from services.block_manager.auditor import LastAudits
from services.block_manager.operators import block_watch
from services.block_manager.operators.service import BlockManagerService
from services.block_manager.rounds import Connection, RoundRunner
from services.gateway.dashboard.block_maps import BlockMaps
from services.gateway.dashboard.feed import INTERVAL_S, merge_patch

HEADER = (
    "| pool blocks | first look, s | server, ms | longest call, ms | manager, ms | gateway, ms "
    "| patch, KB | whole, KB |\n|---:|---:|---:|---:|---:|---:|---:|---:|"
)


@dataclass
class Direct:
    """In place of the gateway's relay: calls the block manager's service, and notes its CPU."""

    service: Any
    manager_s: float = 0.0
    reply: pb.WatchBlocksResponse = field(default_factory=pb.WatchBlocksResponse)

    async def send(self, method: str, request: bytes, timeout_s: float | None) -> bytes:
        start = time.process_time()
        self.reply = await self.service.WatchBlocks(pb.WatchBlocksRequest.FromString(request), None)
        encoded = self.reply.SerializeToString()
        self.manager_s = time.process_time() - start
        return encoded


@dataclass
class Costs:
    of: dict[str, list[float]] = field(default_factory=dict)

    def note(self, **values: float) -> None:
        for name, value in values.items():
            self.of.setdefault(name, []).append(value)

    def cell(self, name: str) -> str:
        values = self.of[name]
        return f"{sum(values) / len(values):.1f} ({max(values):.1f})"


class Feed:
    """One viewer's feed of the pools."""

    def __init__(self, server: "redis.asyncio.Redis", direct: Direct) -> None:
        self._server = server
        self._direct = direct
        self._maps = BlockMaps(direct, dict)  # type: ignore[arg-type]
        self.pools: dict[str, Any] = {}

    async def update(self, costs: Costs) -> None:
        await self._server.slowlog_reset()
        server_s, start = await cpu_s(self._server), time.process_time()
        await self._maps.update()
        patch = to_json(merge_patch(self.pools, self._maps.pools))
        all_s = time.process_time() - start
        server_s = await cpu_s(self._server) - server_s
        calls = [each["duration"] for each in await self._server.slowlog_get(1000)]
        self.pools = self._maps.pools
        costs.note(
            server=server_s * 1e3,
            longest=max(calls) / 1e3,
            manager=self._direct.manager_s * 1e3,
            gateway=(all_s - self._direct.manager_s) * 1e3,
            patch=len(patch) / 1e3,
        )

    def num_unread(self) -> int:
        return sum(cell[0] for pool in self.pools.values() for cell in pool["cells"].values())


async def change(requests: Requests, running: list[str], number: int) -> None:
    """The oldest requests end, and new ones begin; all have finished their blocks."""
    for _ in range(number):
        if len(running) > number:
            await requests.call("release", running.pop(0))
        running.append(requests.new())
        await requests.call("allocate", running[-1])
        await requests.call("commit", running[-1])


async def measure(url: str, store: RedisStore, num_blocks: int, num_updates: int) -> None:
    spec = PoolSpec(f"bench-{num_blocks}", "bench", "bench", num_blocks, 16, 1)
    await store.register_pool(spec)
    await store.register_worker(spec, WORKER)
    await fill(store, spec)
    connection = Connection(store, MemoryRegistry())

    async def connect() -> Connection:
        return connection

    runner = RoundRunner(connection, connect)
    service = BlockManagerService(runner, "manager", b"", 1.0, LastAudits())
    server = redis.asyncio.Redis.from_url(url)
    await server.config_set("slowlog-log-slower-than", 0)
    await server.config_set("slowlog-max-len", 1000)
    feed = Feed(server, Direct(service))
    num_first, reading = 0, Costs()
    while num_first == 0 or feed.num_unread():
        await feed.update(reading)
        num_first += 1
    size, costs, running = min(250, num_blocks // 40), Costs(), list[str]()
    requests = Requests(store, spec.pool_id, size)
    for _ in range(num_updates):
        await change(requests, running, min(8, num_blocks // size // 10))
        await feed.update(costs)
    names = ("server", "longest", "manager", "gateway", "patch")
    cells = " | ".join(costs.cell(name) for name in names)
    whole = len(to_json(feed.pools)) / 1e3
    print(f"| {num_blocks:,} | {num_first * INTERVAL_S:.1f} | {cells} | {whole:.0f} |", flush=True)
    await server.aclose()
    await store.drop_pool(spec.pool_id)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pools", default="1000,65536,1000000", help="blocks of each pool")
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    block_watch.MIN_INTERVAL_S = 0.0
    async with own_server() as url:
        store = await RedisStore.connect(url)
        print(HEADER)
        for num_blocks in map(int, options.pools.split(",")):
            await measure(url, store, num_blocks, options.updates)
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
