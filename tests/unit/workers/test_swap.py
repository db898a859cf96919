"""Preempted sequences are copied to the swap pool, and return without a recompute."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockstore.errors import StaleHolder
from services.protocol.messages import Failed, Prefilled, Requeued, RequeueReason
from services.protocol.ticket import Swapped, SwappedTable, Ticket, TicketSequence
from services.worker.swap.cost import SwapCost

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT, FakeSession, expected, next_token, ticket
from .preempting import evict_all
from .runs import finished, outputs, start

PREEMPTIONS = "quire:num_preemptions_total"


async def victim(pair: WorkerPair, num_tokens: int = 5) -> Ticket:
    """A sequence that runs at the decode worker and has drawn some tokens; the gate is closed."""
    pair.decode_model.pause_after = num_tokens
    issued = await start(pair, ticket("r9", PROMPT, max_tokens=20))
    await pair.until(lambda: len(outputs(pair.session, "r9")) == num_tokens)
    return issued


async def preempt(pair: WorkerPair) -> Ticket:
    """Preempt the victim; returns the ticket that the gateway gets."""
    pair.store.ledger("pool").demands.add("h-r9")
    await pair.until(lambda: pair.decode_figures.get_sample_value(PREEMPTIONS) == 1)
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    (requeued,) = pair.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    back: Ticket = requeued.ticket
    return back


async def come_back(pair: WorkerPair, back: Ticket, session: FakeSession) -> Ticket:
    """Send the ticket to prefill again, under a new holder, and to decode."""
    again = replace(back, attempt=2, holder_id="h-r9-again")
    pair.prefill.role.submit(session, again)
    await pair.until(lambda: bool(session.events))
    issued: Ticket = session.of(Prefilled)[0].ticket
    pair.decode.role.reserve(pair.session, *issued.key, 1)
    pair.decode.role.admit(pair.session, issued)
    return issued


def _new(pair: WorkerPair, back: Ticket, issued_again: Ticket) -> Sequence[int]:
    num_before = len(back.sequences[0].token_ids)
    of_prefill = issued_again.sequences[0].token_ids[num_before:]
    of_decode = [o.token_ids[0] for o in outputs(pair.session, "r9") if o.attempt == 2]
    return [*of_prefill, *of_decode]


async def test_blocks_that_its_holder_does_not_have_are_not_read(make_pair: MakePair) -> None:
    """A ticket that names them in another order, or other blocks: its sequence is computed
    again."""
    pair = await make_pair(num_swap_blocks=16)
    await victim(pair)
    back = await preempt(pair)
    assert back.swapped is not None
    await pair.until_empty()
    evict_all(pair)
    num_copied = pair.arena.num_copied
    forged = replace(back.swapped, tables=(SwappedTable(0, back.swapped.block_ids[::-1]),))
    again = await come_back(pair, replace(back, swapped=forged), FakeSession())
    await pair.until(lambda: finished(pair.session, "r9"))
    assert [*back.sequences[0].token_ids, *_new(pair, back, again)] == expected(PROMPT, 20)
    assert pair.arena.num_copied == num_copied
    assert pair.prefill.metrics.kv_corrupt._value.get() == 0


async def test_a_ticket_for_another_colder_pool_is_computed(make_pair: MakePair) -> None:
    """Also one with impossible block ids: nothing is read from there."""
    pair = await make_pair(num_swap_blocks=16)
    sequence = TicketSequence(0, tuple(expected(PROMPT, 2)))
    wrong = ("elsewhere", (0, 1, 2)), ("colder", (0, 1, 99)), ("colder", (0, 1))
    for number, (pool_id, block_ids) in enumerate(wrong, 1):
        swapped = Swapped(pool_id, "h", 2, (SwappedTable(0, block_ids),))
        session = FakeSession()
        asked = ticket(f"r{number}", PROMPT, sequences=(sequence,), swapped=swapped)
        pair.prefill.role.submit(session, asked)
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
