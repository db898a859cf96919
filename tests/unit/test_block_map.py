"""The block map of the dashboard: it agrees with the ledger after a bounded number of reads."""

import random
from collections.abc import Sequence

import pytest

from blockstore.memory.ledger import Ledger
from blockstore.memory_store import MemoryStore
from blockstore.records import BlockInfo, PoolSpec
from services.block_manager.operators.block_map import MAX_CELLS, MAX_LOOKS, BlockMap, BlockState

SPEC = PoolSpec("p", "m", "f", num_blocks=64, block_size=4, block_bytes=64)


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def truth(ledger: Ledger, block_id: int) -> BlockState:
    holders = [h for h in ledger.holders.values() if block_id in h.held]
    if any(ledger.workers.get(holder.worker_id) for holder in holders):
        return BlockState.QUARANTINED
    if holders:
        return BlockState.HELD if len(holders) == 1 else BlockState.SHARED
    return BlockState.CACHED if block_id in ledger.blocks.cached else BlockState.FREE


def shown(block_map: BlockMap) -> list[list[int]]:
    """The counts of all cells."""
    cells = {cell: counts for cell, counts, _, _ in block_map.cells()}
    free = [[len(block_map.blocks_of(i)), 0, 0, 0, 0, 0] for i in range(block_map.num_cells)]
    return [cells.get(cell, free[cell]) for cell in range(block_map.num_cells)]


async def new_store(spec: PoolSpec = SPEC) -> MemoryStore:
    store = MemoryStore()
    await store.register_pool(spec)
    for worker_id in ("a", "b"):
        await store.register_worker(spec, worker_id)
    return store


async def advance(block_map: BlockMap, store: MemoryStore) -> None:
    """Two updates: one reads the holders and their lists; blocks that were dirty before are read in
    the same one."""
    await block_map.advance(store)
    await block_map.advance(store)


async def test_a_block_is_shown_through_its_whole_life() -> None:
    store = await new_store()
    block_map = BlockMap(await store.stats("p"))
    await store.allocate("p", "h1", "a", 1, [hash_of(1)], 2)
    await advance(block_map, store)
    assert [c for c, *_ in shown(block_map)][:3] == [0, 0, 1]
    assert shown(block_map)[0][BlockState.HELD] == 1
    assert block_map.holders_of(0) == ["h1"]

    await store.commit("p", "h1", 1, [(0, hash_of(1))])
    await store.allocate("p", "h2", "b", 2, [hash_of(1)], 1)
    await advance(block_map, store)
    assert shown(block_map)[0][BlockState.SHARED] == 1

    await store.fence("p", "b")
    await advance(block_map, store)
    assert shown(block_map)[0][BlockState.QUARANTINED] == 1
    assert shown(block_map)[1][BlockState.HELD] == 1

    await store.reap("p", "b")
    await store.release("p", "h1", 1)
    await advance(block_map, store)
    assert shown(block_map)[0][BlockState.CACHED] == 1
    assert shown(block_map)[1][BlockState.FREE] == 1


@pytest.mark.parametrize("seed", range(20))
async def test_the_block_map_agrees_with_the_ledger_after_any_changes(seed: int) -> None:
    draw = random.Random(seed)
    store = await new_store()
    ledger = store.ledger("p")
    block_map = BlockMap(await store.stats("p"))
    living: list[str] = []
    for number in range(60):
        if living and draw.random() < 0.4:
            holder_id = living.pop(draw.randrange(len(living)))
            await store.release("p", holder_id, 1)
        elif ledger.blocks.num_available > 12:
            holder_id, start = f"h{number}", draw.randrange(4)
            hashes = [hash_of(start * 10 + i) for i in range(draw.randrange(4))]
            worker_id = draw.choice("ab")
            given = await store.allocate("p", holder_id, worker_id, number, hashes, 5)
            pairs = list(zip(given.block_ids, hashes, strict=False))
            new = pairs[given.num_cached_blocks :]
            if new:
                await store.commit("p", holder_id, 1, new)
            living.append(holder_id)
        if draw.random() < 0.3:
            await block_map.advance(store)
    await advance(block_map, store)
    for block_id in range(SPEC.num_blocks):
        counts = shown(block_map)[block_id]
        assert counts[truth(ledger, block_id)] == 1, block_id
        assert sum(counts) == 1


class CountingStore(MemoryStore):
    num_looked = 0
    num_lists = 0

    async def block_infos(self, pool_id: str, block_ids: Sequence[int]) -> tuple[BlockInfo, ...]:
        self.num_looked = max(self.num_looked, len(block_ids))
        return await super().block_infos(pool_id, block_ids)


async def test_a_large_pool_is_read_in_bounded_steps_until_all_is_known() -> None:
    spec = PoolSpec("p", "m", "f", num_blocks=50_000, block_size=4, block_bytes=64)
    store = CountingStore()
    await store.register_pool(spec)
    await store.register_worker(spec, "a")
    await store.allocate("p", "h", "a", 1, [], 30_000)
    block_map = BlockMap(await store.stats("p"))
    assert block_map.num_cells <= MAX_CELLS
    assert sum(counts[BlockState.UNREAD] for counts in shown(block_map)) == 30_000
    for _ in range(30_000 // MAX_LOOKS + 1):
        await block_map.advance(store)
    assert store.num_looked <= MAX_LOOKS
    assert sum(counts[BlockState.UNREAD] for counts in shown(block_map)) == 0
    assert sum(counts[BlockState.HELD] for counts in shown(block_map)) == 30_000
    assert sum(map(sum, shown(block_map))) == 50_000
