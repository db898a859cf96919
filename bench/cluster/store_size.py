"""Measures what a Valkey keeps for pools of finished blocks."""

import redis.asyncio

from bench.store import WORKER, fill, own_server
from blockstore.records import PoolSpec
from blockstore.redis_store import RedisStore

_PER_POOL = 100_000


async def bytes_a_block(num_blocks: int) -> float:
    """Fill pools with `num_blocks` blocks, half held and half cached, and return the memory that
    the server uses for them, by block."""
    async with own_server() as url:
        server, store = redis.asyncio.Redis.from_url(url), await RedisStore.connect(url)
        before = (await server.info("memory"))["used_memory"]
        for number in range(num_blocks // _PER_POOL):
            spec = PoolSpec(f"pool-{number}", "m", "f", _PER_POOL, 64, 1, 0)
            await store.register_pool(spec)
            await store.register_worker(spec, WORKER)
            await fill(store, spec)
        used = (await server.info("memory"))["used_memory"] - before
        await store.close()
        await server.aclose()
    return float(used / (num_blocks // _PER_POOL * _PER_POOL))
