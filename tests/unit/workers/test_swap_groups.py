"""Preempted groups are copied to the swap pool and back with their structure: shared blocks are
copied once and shared again. Blocks of 4."""

from dataclasses import replace

import pytest

from services.protocol.ticket import TicketSequence

from .conftest import MakePair, WorkerPair, counts_steps
from .fakes import PROMPT, asked, expected, right, ticket
from .preempting import (
    come_back,
    ended_again,
    evict_all,
    finish,
    preempt,
    running,
    swapped_out,
    tables,
    unstarted,
)
from .runs import admit

pytestmark = counts_steps
REFUSED = "quire:num_swaps_refused_total"


# Out and back


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 5])
async def test_a_swapped_out_group_goes_on_with_one_token_each_computed(
    make_pair: MakePair, n: int, block_size: int, num_steps: int
) -> None:
    """At any position in a block, also with a tail that all still share."""
    pair = await make_pair(
        256 // block_size, block_size, num_swap_blocks=256 // block_size, max_num_batched_tokens=64
    )
    if num_steps:
        await running(pair, asked(n), num_steps)
    else:
        await unstarted(pair, asked(n))
    back = await preempt(pair)
    assert back.swapped is not None
    await pair.until_empty()
    evict_all(pair)
    num_computed = pair.arena.num_computed
    issued = await come_back(pair, back)
    assert pair.arena.num_computed - num_computed == n
    drawn = await finish(pair, issued)
    assert drawn == {index: right(index) for index in range(n)}


async def test_blocks_are_copied_once_and_shared_again(make_pair: MakePair) -> None:
    """2 blocks of the prompt and 2 of each of 3 sequences: 10 + 8 tokens, of which 17 are computed,
    so the last block of each has one."""
    pair = await make_pair(64, num_swap_blocks=32)
    assert pair.swap_pool is not None
    back = await swapped_out(pair, asked(3))
    assert back.swapped is not None
    assert {len(state.token_ids) for state in back.sequences} == {8}
    there = [table.block_ids for table in back.swapped.tables]
    assert there == [(0, 1, 2, 3, 4), (0, 1, 5, 6, 7), (0, 1, 8, 9, 10)]
    assert pair.swap_pool.num_copied == 2 + 3 * 3
    assert (await pair.store.stats("colder")).num_held == 2 + 3 * 3
    evict_all(pair)
    num_copied = pair.arena.num_copied
    issued = await come_back(pair, back)
    assert pair.arena.num_copied - num_copied == 2 + 3 * 3
    here = tables(issued.sequences)
    assert len({table[:2] for table in here}) == 1
    assert len({block for table in here for block in table[2:]}) == 3 * 3
    assert await finish(pair, issued) == {index: right(index) for index in range(3)}


async def test_cached_blocks_are_not_copied_back(make_pair: MakePair) -> None:
    """Neither are the full blocks of each sequence."""
    pair = await make_pair(64, num_swap_blocks=32)
    back = await swapped_out(pair, asked(3))
    num_copied, num_computed = pair.arena.num_copied, pair.arena.num_computed
    issued = await come_back(pair, back)
    assert pair.arena.num_copied - num_copied == 3  # the tails
    assert pair.arena.num_computed - num_computed == 3
    assert await finish(pair, issued) == {index: right(index) for index in range(3)}


async def test_blocks_in_the_swap_pool_are_not_copied_again(make_pair: MakePair) -> None:
    """Its full blocks stay there, cached, after its return: a second preemption copies only new
    blocks."""
    pair = await make_pair(64, num_swap_blocks=64)
    assert pair.swap_pool is not None
    back = await swapped_out(pair, asked(3))
    issued = await come_back(pair, back)
    num_copied = pair.swap_pool.num_copied
    pair.decode_model.pause_after = pair.decode_model.num_steps + 2
    num_begun = pair.decode_model.num_begun
    admit(pair, issued)
    await pair.until(lambda: pair.decode_model.num_begun == num_begun + 3)
    again = await preempt(pair, "h-again")
    assert {len(state.token_ids) for state in again.sequences} == {12}
    assert pair.swap_pool.num_copied - num_copied == 3 * 2  # tokens 16 to 20 of each
    assert again.swapped is not None
    assert back.swapped is not None
    for before, now in zip(back.swapped.tables, again.swapped.tables, strict=True):
        assert now.block_ids[:4] == before.block_ids[:4]


async def test_greedy_sequences_are_one_until_they_differ(make_pair: MakePair) -> None:
    """They hold the same tokens in different blocks; afterwards they share one copy of each."""
    pair = await make_pair(64, num_swap_blocks=8)
    assert pair.swap_pool is not None
    back = await swapped_out(pair, asked(4, temperature=0.0))
    assert pair.swap_pool.num_copied == 5
    evict_all(pair)
    num_computed = pair.arena.num_computed
    issued = await come_back(pair, back)
    assert pair.arena.num_computed - num_computed == 1
    assert len(set(tables(issued.sequences))) == 1
    drawn = await finish(pair, issued)
    assert drawn == dict.fromkeys(range(4), tuple(expected(PROMPT, 16)))


# Computed again


async def test_a_recomputed_group_finds_the_cached_blocks_of_its_sequences(
    pair: WorkerPair,
) -> None:
    """17 tokens of each sequence were computed: 2 blocks are common, 2 belong to each one, and the
    last two tokens are computed."""
    await running(pair, asked(3), 6)
    back = await preempt(pair)
    assert back.swapped is None
    await pair.until_empty()
    num_computed = pair.arena.num_computed
    issued = await come_back(pair, back)
    assert pair.arena.num_computed - num_computed == 3 * 2
    here = tables(issued.sequences)
    assert len({table[:2] for table in here}) == 1
    admit(pair, issued)
    await pair.until(lambda: ended_again(pair) == {0, 1, 2})
    await pair.until_empty()


@pytest.mark.parametrize("num_swap_blocks", [1, 10])
async def test_without_room_for_all_of_it_it_is_computed_again(
    make_pair: MakePair, num_swap_blocks: int
) -> None:
    """All or nothing: it takes 11 blocks. A metric shows the reason."""
    pair = await make_pair(64, num_swap_blocks=num_swap_blocks)
    await running(pair, asked(3), 6)
    back = await preempt(pair)
    assert back.swapped is None
    assert pair.decode_figures.get_sample_value(REFUSED) == 1
    assert pair.store.ledger("colder").waiters == {}
    evict_all(pair)
    issued = await come_back(pair, back)
    assert await finish(pair, issued) == {index: right(index) for index in range(3)}


# What is not as it was


@pytest.mark.parametrize("which", ["trunk", "own", "tail", "shared tail"])
async def test_blocks_that_say_something_else_are_not_trusted(
    make_pair: MakePair, which: str
) -> None:
    """From the wrong block on, the sequences that have it are computed again."""
    pair = await make_pair(64, num_swap_blocks=32)
    assert pair.swap_pool is not None
    if which == "shared tail":
        await unstarted(pair, asked(3))
    else:
        await running(pair, asked(3), 6)
    back = await preempt(pair)
    await pair.until_empty()
    assert back.swapped is not None
    number = {"trunk": 1, "own": 2, "tail": 4, "shared tail": 2}[which]
    wrong = back.swapped.tables[1].block_ids[number]
    pair.swap_pool.stamps.mark_owned([wrong], "somebody")
    evict_all(pair)
    num_computed = pair.arena.num_computed
    issued = await come_back(pair, back)
    num_again = {"trunk": 6 + 3 * 8, "own": 1 + 10 + 1, "tail": 1 + 2 + 1, "shared tail": 2 + 3}
    assert pair.arena.num_computed - num_computed == num_again[which]
    assert await finish(pair, issued) == {index: right(index) for index in range(3)}


async def test_tails_of_siblings_that_are_exchanged_are_not_read(make_pair: MakePair) -> None:
    """A tail's stamp names only its owner; a tail is read from its own place, or not at all."""
    pair = await make_pair(64, num_swap_blocks=32)
    back = await swapped_out(pair, asked(2))
    assert back.swapped is not None
    first, second = back.swapped.tables
    forged = (
        replace(first, block_ids=(*first.block_ids[:-1], second.block_ids[-1])),
        replace(second, block_ids=(*second.block_ids[:-1], first.block_ids[-1])),
    )
    evict_all(pair)
    num_copied = pair.arena.num_copied
    issued = await come_back(pair, replace(back, swapped=replace(back.swapped, tables=forged)))
    assert pair.arena.num_copied - num_copied == 1  # of the prompt's tail, to write into
    assert await finish(pair, issued) == {index: right(index) for index in range(2)}


# Whether it is worth it


async def test_shared_blocks_are_copied_and_computed_once(make_pair: MakePair) -> None:
    """2 blocks of prompt and 1 of each of 3 sequences: 5 blocks to copy out and back at 1 ms, or 8
    + 3 x 2 tokens to compute."""
    pair = await make_pair(num_swap_blocks=16, compares_costs=True)
    swap_pool = pair.decode.swap_pool
    assert swap_pool is not None
    swap_pool.cost.observe(num_blocks=10, copying_s=0.010, total_s=0.010)
    states = tuple(TicketSequence(i, (i, i, i), (0, 1, 2 + i), len(PROMPT) + 2) for i in range(3))
    group = ticket("r1", PROMPT, sequences=states)
    num_tokens = len(PROMPT) + 3 * 2
    just, barely = 10e6 / num_tokens * 1.01, 10e6 / num_tokens * 0.99
    assert swap_pool.is_worthwhile(replace(group, prefill_ns_per_token=int(just)), [])
    assert not swap_pool.is_worthwhile(replace(group, prefill_ns_per_token=int(barely)), [])
    other = ticket("r2", PROMPT, sequences=(TicketSequence(0, (1,), (0, 1, 9), 10),))
    # 3 blocks of 4 tokens are left
    assert swap_pool.is_worthwhile(replace(group, prefill_ns_per_token=510_000), [other])
    assert not swap_pool.is_worthwhile(replace(group, prefill_ns_per_token=490_000), [other])
