"""The block store's time per generated token: measured on a server with the calls of a simulation,
or estimated from the numbers of calls and blocks."""

import asyncio
import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from advisor.memory import PagedMemory
from advisor.simulation import simulate
from advisor.workload import RecordedRequest
from blockstore.errors import BlockStoreError
from blockstore.redis_store import RedisStore
from quire.supervisor import valkey

_START_LIMIT_S = 10.0

CALL_US, BLOCK_US = 150.0, 3.5
"""Time of a call and of each block in it, for estimates without a server
(docs/benchmarks/store-and-recovery.md)."""


def counted_us(num_calls: int, num_blocks: int) -> float:
    """Estimated microseconds of all calls. Each block counts three times: it is allocated,
    committed and released once."""
    return CALL_US * num_calls + BLOCK_US * 3 * num_blocks


async def measured_us(
    url: str, asked: Sequence[RecordedRequest], num_slots: int, block_size: int, max_model_len: int
) -> float:
    """Simulate the requests on a pool at the server `url`. Returns the microseconds that the store
    took for each generated token. BlockStoreError."""
    store = await RedisStore.connect(url)
    pool_id = f"advise-{secrets.token_hex(6)}"
    try:
        memory = await PagedMemory.on(store, pool_id, num_slots, block_size, max_model_len)
        await simulate(asked, memory)
    finally:
        with suppress(BlockStoreError):  # if the server is gone, so is the pool
            await store.drop_pool(pool_id)
        await store.close()
    return 1e6 * memory.store_s / sum(request.num_generated_tokens for request in asked)


@asynccontextmanager
async def embedded_valkey() -> AsyncIterator[str]:
    """Yield the URL of an embedded Valkey that runs until the block is left. NoValkey: it is not
    installed; TimeoutError: it does not answer."""
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
