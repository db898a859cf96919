"""Preempted sequences are copied to the swap pool, and return without a recompute."""

from dataclasses import replace

import pytest

from blockstore.errors import StaleHolder
from services.protocol.messages import Failed, Prefilled
from services.protocol.ticket import Swapped, SwappedTable, TicketSequence
from services.worker.swap.cost import SwapCost

from .conftest import MakePair, counts_steps
from .fakes import PROMPT, FakeSession, asked, expected, next_token, right, ticket
from .preempting import come_back, evict_all, finish, swapped_out
from .runs import count


@counts_steps
async def test_blocks_that_its_holder_does_not_have_are_not_read(make_pair: MakePair) -> None:
    """A ticket that names them in another order, or other blocks: its sequence is computed
    again."""
    pair = await make_pair(num_swap_blocks=16)
    back = await swapped_out(pair, asked(1))
    assert pair.decode_figures.get_sample_value("quire:num_preemptions_total") == 1
    assert back.swapped is not None
    evict_all(pair)
    num_copied = pair.arena.num_copied
    forged = replace(back.swapped, tables=(SwappedTable(0, back.swapped.block_ids[::-1]),))
    issued = await come_back(pair, replace(back, swapped=forged))
    pair.decode.role.abort(pair.session, *back.key)
    assert await finish(pair, issued) == {0: right(0)}
    assert pair.arena.num_copied == num_copied
    assert count(pair.prefill.metrics.kv_corrupt) == 0


async def test_a_ticket_for_another_colder_pool_is_computed(make_pair: MakePair) -> None:
    """Also one with impossible block ids: nothing is read from there."""
    pair = await make_pair(num_swap_blocks=16)
    sequence = TicketSequence(0, tuple(expected(PROMPT, 2)))
    wrong = ("elsewhere", (0, 1, 2)), ("colder", (0, 1, 99)), ("colder", (0, 1))
    for number, (pool_id, block_ids) in enumerate(wrong, 1):
        swapped = Swapped(pool_id, "h", 2, (SwappedTable(0, block_ids),))
        session = FakeSession()
        wrong_one = ticket(f"r{number}", PROMPT, sequences=(sequence,), swapped=swapped)
        pair.prefill.role.submit(session, wrong_one)
        await pair.until(lambda session=session: bool(session.events))  # type: ignore[misc]
        assert not session.of(Failed)
        drawn = session.of(Prefilled)[0].ticket.sequences[0].token_ids[-1]
        assert drawn == next_token([*PROMPT, *sequence.token_ids])
    with pytest.raises(StaleHolder):
        await pair.store.claim("colder", "h", 2, "Prefill")


def test_swapping_is_compared_with_computing_once_both_are_measured() -> None:
    """100 blocks at 1 ms in each direction, and 10 ms for each copy: 220 ms."""
    cost = SwapCost()
    assert cost.is_below(100, 1600, prefill_ns_per_token=1)
    cost.observe(num_blocks=50, copying_s=0.05, total_s=0.06)
    assert cost.is_below(100, 1600, prefill_ns_per_token=0)
    assert cost.is_below(100, 1600, prefill_ns_per_token=138_000)
    assert not cost.is_below(100, 1600, prefill_ns_per_token=137_000)
