"""What the block store takes for a workload's tokens: measured on a server, by the calls that a
simulation makes, or counted."""

import asyncio
import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from blockstore.errors import BlockStoreError
from blockstore.redis_store import RedisStore
from quire.supervisor import valkey
from services.advisor.memory import PagedMemory
from services.advisor.simulation import simulate
from services.advisor.workload import Asked

_START_LIMIT_S = 10.0

CALL_US, BLOCK_US = 150.0, 3.5
"""What a call takes its caller, and each block in it, where none can be timed
(docs/benchmarks/store-and-recovery.md)."""


def counted_us(num_calls: int, num_blocks: int) -> float:
    """Each block of a table is allocated, committed and released once."""
    return CALL_US * num_calls + BLOCK_US * 3 * num_blocks


async def measured_us(
    url: str, asked: Sequence[Asked], num_slots: int, block_size: int, max_model_len: int
) -> float:
    """Microseconds of the store's answers, for each token generated. BlockStoreError."""
    store = await RedisStore.connect(url)
    pool_id = f"advise-{secrets.token_hex(6)}"
    try:
        memory = await PagedMemory.on(store, pool_id, num_slots, block_size, max_model_len)
        await simulate(asked, memory)
    finally:
        with suppress(BlockStoreError):  # a server that is gone has no pool
            await store.drop_pool(pool_id)
        await store.close()
    return 1e6 * memory.store_s / sum(request.num_generated_tokens for request in asked)


@asynccontextmanager
async def own_server() -> AsyncIterator[str]:
    """The URL of an embedded Valkey that ends with the block. NoValkey: it is not installed.
    TimeoutError."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        command = valkey.command(run)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await valkey.wait_until_answering(run)
            yield valkey.redis_url(run)
        finally:
            process.terminate()
            await process.wait()
