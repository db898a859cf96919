"""The stamps of blocks that a worker was just given, when the store loses its ledger."""

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blockstore.hashing import next_hash
from blockstore.records import Growth
from blockstore.redis_store import RedisStore
from services.pool.locks import revoke_lock
from services.pool.stamps import StampState, owner_token
from services.worker.membership import Membership, join
from tests.conftest import Valkey

from .conftest import LAYOUT, NUM_BLOCKS, PLAN

ROOT = b"r" * 16
TOKENS = (1, 2, 3, 4)
EVICTED, NEW = next_hash(ROOT, TOKENS), next_hash(ROOT, (5, 6, 7, 8))


@pytest.fixture
async def member(own_valkey: Valkey, tmp_path: Path) -> AsyncIterator[Membership]:
    """The only worker of a pool whose block 0 is finished and cached."""
    store = await RedisStore.connect(own_valkey.url, retry_for_s=math.inf)
    member = await join(store, store.run_id, tmp_path, LAYOUT, "decode-1", PLAN, watermark=0.0)
    found = await store.allocate(member.spec.pool_id, "first", "decode-1", 1, [], 1)
    assert found.block_ids == (0,)
    member.stamps.mark_owned(found.block_ids, "first")
    member.stamps.complete(0, EVICTED, ROOT, TOKENS)
    await store.commit(member.spec.pool_id, "first", 1, [(0, EVICTED)])
    await store.release(member.spec.pool_id, "first", 1)
    yield member
    await store.close()
    member.close()


@pytest.mark.parametrize("grows", [False, True])
async def test_an_evicted_block_is_not_offered_before_its_new_holder_writes(
    own_valkey: Valkey, member: Membership, grows: bool
) -> None:
    """The ledger is lost after the block is given to a new holder and before the step that writes
    it. The recovery must not offer the block with its old content."""
    store, pool_id = member.store, member.spec.pool_id
    first = NUM_BLOCKS - 1 if grows else NUM_BLOCKS
    await store.allocate(pool_id, "second", "decode-1", 2, [], first)
    if grows:
        growth = Growth("second", 1, first, NUM_BLOCKS)
        (grown,) = (await store.extend(pool_id, "decode-1", [growth])).grown
        assert grown.block_ids == (0,)
    own_valkey.command("FLUSHALL")
    await store.heartbeat(pool_id, "decode-1")
    assert (await store.stats(pool_id)).ledger_epoch == 2

    assert await store.match(pool_id, [EVICTED]) == 0
    member.stamps.complete(0, NEW, ROOT, (5, 6, 7, 8))
    assert await store.commit(pool_id, "second", 1, [(0, NEW)]) == (True,)
    assert (await store.audit(pool_id)).violations == ()


async def test_new_blocks_are_stamped_once_and_cached_ones_never(member: Membership) -> None:
    store, pool_id = member.store, member.spec.pool_id
    for _ in range(2):  # sent again: the answer is the same, and block 1 is finished by then
        found = await store.allocate(pool_id, "second", "decode-1", 2, [EVICTED], 2)
        assert (found.block_ids, found.num_cached_blocks) == ((0, 1), 1)
        if member.stamps.read(1).state is StampState.PRIVATE:
            member.stamps.complete(1, NEW, EVICTED, TOKENS)
    assert [member.stamps.is_committed(block_id) for block_id in (0, 1)] == [True, True]
    assert member.stamps.read(0).owner == owner_token("first")
    assert member.stamps.read(1).owner == owner_token("second")


async def test_a_worker_that_was_given_up_stamps_nothing(member: Membership) -> None:
    """Other workers may have the block by now."""
    store, pool_id = member.store, member.spec.pool_id
    revoke_lock(member.lock.path)
    found = await store.allocate(pool_id, "second", "decode-1", 2, [], NUM_BLOCKS)
    assert 0 in found.block_ids
    assert member.stamps.read(0).prefix_hash == EVICTED
    assert member.stamps.is_committed(0)
