"""The copies of a pull, its refusals, and the blocks that it holds meanwhile."""

import asyncio

import pytest

from blockstore.hashing import prefix_hashes
from services.mover.pull import PullFailed
from services.mover.transport import State
from services.protocol.ticket import TicketSequence
from tests.waiting import until

from .pools import NUM_BLOCKS, ROOT, SIZE, ProcessEnded, World

TOKENS = list(range(11, 22))  # 10 are computed: blocks of 4, 4 and 2


async def test_a_ticket_goes_on_in_the_other_pool() -> None:
    world = await World.make()
    ticket = await world.detached(TOKENS)
    moved = await world.pull(ticket).run()
    assert moved is not None
    (state,) = moved.sequences
    assert (moved.pool_id, moved.holder_id, moved.holder_epoch) == ("b", "h", 2)
    assert (state.block_ids, state.num_computed_tokens) == ((0, 1, 2), 10)
    assert [world.b.block(i) for i in (0, 1, 2)] == [world.a.block(i) for i in (0, 1, 2)]
    hashes = prefix_hashes(ROOT, tuple(TOKENS), SIZE)
    assert world.b.stamps.first_mismatch((0, 1), ROOT, hashes, TOKENS[:8]) is None
    assert world.b.stamps.are_written_by([2], "h"), "the tail is its holder's, and goes on"
    assert await world.store.match("b", hashes) == 2
    assert (await world.num_held("a"), await world.num_held("b")) == (0, 3)
    claim = await world.store.claim("b", "h", 2, "worker", state.block_ids)
    assert claim.epoch == 3


async def test_blocks_that_are_cached_here_are_not_copied() -> None:
    world = await World.make()
    ticket = await world.detached(TOKENS)
    await world.b.compute("earlier", TOKENS[:9])
    pull = world.pull(ticket)
    moved = await pull.run()
    assert moved is not None
    assert moved.sequences[0].block_ids[:2] == (0, 1), "shared with the earlier holder"
    assert pull.num_blocks == 1


async def test_a_cached_prefix_is_copied_into_the_cache() -> None:
    world = await World.make()
    await world.a.compute("h", TOKENS)
    pull = world.pull(world.ticket(TOKENS))
    assert await pull.run() is None
    hashes = prefix_hashes(ROOT, tuple(TOKENS), SIZE)
    assert (pull.num_blocks, await world.store.match("b", hashes)) == (2, 2)
    assert await world.num_held("b") == 0
    await world.store.release("a", "h", 1)
    assert await world.num_held("a") == 0
    again = world.pull(world.ticket(TOKENS))
    assert await again.run() is None
    assert again.num_blocks == 0, "it is here already"


@pytest.mark.parametrize("number", [1, 2], ids=["before the blocks", "before the second stamps"])
@pytest.mark.parametrize("block_id", [0, 2], ids=["a full block", "the tail"])
async def test_a_block_that_was_given_to_others_meanwhile_does_not_count(
    number: int, block_id: int
) -> None:
    """The lease had ended, the pin was reaped, and a worker of the source wrote other tokens."""
    world = await World.make()
    ticket = await world.detached(TOKENS)

    def give_away(read: int) -> None:
        if read == number:
            world.a.mark_owned("other", [block_id])
            world.a.write(block_id, [99, 99, 99, 99])

    world.transport.before_read = give_away
    with pytest.raises(PullFailed, match="stamps_changed"):
        await world.pull(ticket).run()
    await nothing_came(world)


async def test_a_block_that_came_back_with_the_same_content_does_not_count() -> None:
    """Its owner is another one: while the blocks were read, the block may have had other
    contents."""
    world = await World.make()
    ticket = await world.detached(TOKENS)
    stamp = world.a.stamps.read(0)

    def write_again(read: int) -> None:
        if read == 1:
            world.a.mark_owned("other", [0])
            world.a.stamps.complete(0, stamp.prefix_hash, stamp.parent, stamp.token_ids)

    world.transport.before_read = write_again
    with pytest.raises(PullFailed, match="stamps_changed"):
        await world.pull(ticket).run()
    await nothing_came(world)


@pytest.mark.parametrize("block_id", [0, 2], ids=["a full block", "the tail"])
async def test_blocks_with_other_tokens_are_not_read(block_id: int) -> None:
    world = await World.make()
    ticket = await world.detached(TOKENS)
    world.a.mark_owned("other", [block_id])
    with pytest.raises(PullFailed, match="wrong_stamps"):
        await world.pull(ticket).run()
    assert len(world.transport.reads) == 1, "of the stamps"
    await nothing_came(world)


async def nothing_came(world: World) -> None:
    """Nothing is held, and nothing is in the prefix index of pool b."""
    assert (await world.num_held("a"), await world.num_held("b")) == (0, 0)
    assert await world.store.match("b", prefix_hashes(ROOT, tuple(TOKENS), SIZE)) == 0


async def has_read(world: World, num_reads: int) -> None:
    await until(lambda: len(world.transport.reads) >= num_reads, longest_pause_s=0)


async def test_target_blocks_stay_held_until_the_read_is_over() -> None:
    world = await World.make(lands=False)
    pull = world.pull(await world.detached(TOKENS))
    running = asyncio.create_task(pull.run())
    await has_read(world, 1)
    world.transport.reads[0].land()
    await has_read(world, 2)
    pull.give_up()
    await until(lambda: world.num_held("a"), lambda num_held: not num_held)
    assert await world.num_held("b") == 3, "parts of the read may still land"
    world.transport.reads[1].land()
    with pytest.raises(PullFailed, match="given_up"):
        await running
    await nothing_came(world)
    assert all(read.released for read in world.transport.reads)


async def test_a_read_without_an_end_ends_the_process() -> None:
    world = await World.make(lands=False)
    running = asyncio.create_task(world.pull(await world.detached(TOKENS), 0.05, 0.05).run())
    done, _ = await asyncio.wait([running], timeout=5)
    assert done
    assert isinstance(running.exception(), ProcessEnded)
    assert "has no end" in world.ended[0]


async def test_a_failed_read_breaks_the_source() -> None:
    world = await World.make(lands=False)
    running = asyncio.create_task(world.pull(await world.detached(TOKENS)).run())
    await has_read(world, 1)
    world.transport.reads[0].land(State.FAILED)
    with pytest.raises(PullFailed, match="source_lost"):
        await running
    assert world.source.is_broken
    await nothing_came(world)


async def test_a_full_pool_takes_nothing_and_nobody_waits() -> None:
    world = await World.make()
    ticket = await world.detached(TOKENS)
    await world.store.allocate("b", "all", "worker", 1, [], NUM_BLOCKS - 2)
    with pytest.raises(PullFailed, match="no_room"):
        await world.pull(ticket).run()
    stats = await world.store.stats("b")
    assert (stats.num_waiters, await world.num_held("a")) == (0, 0)


async def test_a_fenced_mover_completes_no_stamps() -> None:
    world = await World.make()
    ticket = await world.detached(TOKENS)

    def fence(read: int) -> None:
        world.is_fenced = world.is_fenced or read == 2

    world.transport.before_read = fence
    with pytest.raises(PullFailed, match="fenced"):
        await world.pull(ticket).run()
    assert not any(world.b.stamps.is_committed(block_id) for block_id in range(3))


async def test_a_claimed_ticket_is_stale_for_everybody_else() -> None:
    world = await World.make()
    ticket = await world.detached(TOKENS)
    await world.store.claim("a", "h", ticket.holder_epoch, "worker")
    with pytest.raises(PullFailed, match="source_refused"):
        await world.pull(ticket).run()
    assert (await world.num_held("b"), world.transport.reads) == (0, [])


async def test_a_ticket_that_no_worker_claims_is_released() -> None:
    world = await World.make()
    pull = world.pull(await world.detached(TOKENS))
    moved = await pull.run()
    assert moved is not None
    await pull.release(moved)
    assert await world.num_held("b") == 0


async def test_a_group_shares_its_blocks_again() -> None:
    world = await World.make()
    prompt = TOKENS[:8]
    given = await world.store.allocate("a", "h", "worker", 1, [], 4)
    hashes = prefix_hashes(ROOT, tuple(prompt), SIZE)
    for index in range(2):
        world.a.write(given.block_ids[index], prompt[index * SIZE : (index + 1) * SIZE])
        parent = hashes[index - 1] if index else ROOT
        tokens = prompt[index * SIZE : (index + 1) * SIZE]
        world.a.stamps.complete(given.block_ids[index], hashes[index], parent, tokens)
    world.a.write(2, [50])
    world.a.write(3, [60])
    epoch = await world.store.detach("a", "h", 1)
    sequences = (
        TicketSequence(0, (50, 51), (0, 1, 2), 9),
        TicketSequence(1, (60, 61), (0, 1, 3), 9),
    )
    moved = await world.pull(world.ticket(prompt, sequences, "h", epoch)).run()
    assert moved is not None
    assert [state.block_ids for state in moved.sequences] == [(0, 1, 2), (0, 1, 3)]
    assert [world.b.block(i) for i in range(4)] == [world.a.block(i) for i in range(4)]
