"""Worked examples of the block store: small pools, literal block ids."""

import pytest

from blockstore.errors import OutOfBlocks
from blockstore.memory_store import MemoryStore
from blockstore.store import BlockStore, PoolSpec

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)


@pytest.fixture
async def store() -> BlockStore:
    """A pool of 11 blocks with workers p (prefill) and d (decode)."""
    store = MemoryStore()
    await store.register_pool(POOL)
    await store.register_worker(POOL, "p")
    await store.register_worker(POOL, "d")
    return store


async def test_never_used_blocks_come_lowest_first(store: BlockStore) -> None:
    first = await store.allocate("pool", "a", "p", 1, [], 4)
    second = await store.allocate("pool", "b", "p", 2, [], 3)

    assert first.block_ids == (0, 1, 2, 3)
    assert second.block_ids == (4, 5, 6)
    with pytest.raises(OutOfBlocks) as refused:
        await store.allocate("pool", "c", "p", 3, [], 5)
    assert (refused.value.needed, refused.value.available) == (5, 4)
