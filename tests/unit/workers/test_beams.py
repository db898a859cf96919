"""Beam searches at the workers: what is found, what moves, and that nothing is left."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.protocol.ticket import (
    EarlyStopping,
    FinishReason,
    Hypothesis,
    Ticket,
    TicketSequence,
)
from services.worker.events import Found, Prefilled, Requeued, RequeueReason, Step

from .conftest import Bench, MakeBench
from .fakes import PROMPT, FakeSession
from .searches import MAX_TOKENS, asked, right


async def prefill(bench: Bench, wanted: Ticket) -> Prefilled:
    session = FakeSession()
    bench.prefill.submit(session, wanted)
    await bench.until(lambda: bool(session.of(Prefilled)))
    event: Prefilled = session.of(Prefilled)[0]
    return event


def admit(bench: Bench, issued: Ticket) -> None:
    bench.decode.reserve(bench.session, *issued.key, issued.width)
    bench.decode.admit(bench.session, issued)


async def start(bench: Bench, wanted: Ticket) -> Ticket:
    event = await prefill(bench, wanted)
    assert event.outputs == ()
    admit(bench, event.ticket)
    return event.ticket


def heard(session: FakeSession, request_id: str) -> list[Found]:
    steps = [output for step in session.of(Step) for output in step.outputs]
    return [output for output in steps if output.request_id == request_id]


def hypotheses(outputs: Iterable[Any]) -> tuple[Hypothesis, ...]:
    found = [output for output in outputs if output.token_ids]
    assert [output.index for output in found] == list(range(len(found)))
    return tuple(Hypothesis(one.token_ids, one.score, one.finish) for one in found)


async def result(bench: Bench, request_id: str = "r1") -> tuple[Hypothesis, ...]:
    await bench.until(lambda: bool(hypotheses(heard(bench.session, request_id))))
    return hypotheses(heard(bench.session, request_id))


async def more_heard(bench: Bench, number: int) -> None:
    wanted = len(heard(bench.session, "r1")) + number
    await bench.until(lambda: len(heard(bench.session, "r1")) >= wanted)


async def more_requeued(bench: Bench, num_seen: int) -> None:
    await bench.until(lambda: len(bench.session.of(Requeued)) > num_seen)


async def more_events(bench: Bench, num_seen: int) -> None:
    await bench.until(lambda: len(bench.session.events) > num_seen)


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", [1, 2, 4, 9])
async def test_a_search_finds_the_best(
    make_bench: MakeBench, width: int, early_stopping: EarlyStopping
) -> None:
    bench = await make_bench(num_blocks=160)
    wanted = asked(
        width=width, num_returned=1 + width // 2, stop_ids=(3, 17), early_stopping=early_stopping
    )
    await start(bench, wanted)
    assert await result(bench) == right(wanted)
    await bench.until_empty()


async def test_a_search_complete_with_its_first_token_ends_at_prefill(bench: Bench) -> None:
    wanted = asked(max_tokens=1)
    event = await prefill(bench, wanted)
    assert event.ticket.sequences == ()
    assert event.ticket.beams is None
    assert hypotheses(event.outputs) == right(wanted)
    await bench.until_empty()


async def test_beams_share_their_common_blocks(make_bench: MakeBench) -> None:
    """Each writes only its own tail: a step computes one token of each beam, and copies no more
    than what forks."""
    bench = await make_bench(num_blocks=160)
    wanted = asked(width=8)
    await start(bench, wanted)
    assert await result(bench) == right(wanted)
    assert bench.arena.num_computed == len(wanted.prompt_token_ids) + 8 * (MAX_TOKENS - 1)
    assert bench.arena.num_copied < 8 * MAX_TOKENS
    await bench.until_empty()


async def test_while_it_searches_the_gateway_hears_that_it_does(bench: Bench) -> None:
    await start(bench, asked(max_tokens=500, width=2))
    await bench.until(lambda: len(heard(bench.session, "r1")) > 3)
    assert set(heard(bench.session, "r1")) == {Found("r1", 1, 0, len(PROMPT) + 1)}
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()


async def test_a_moved_search_goes_on_where_it_was(bench: Bench) -> None:
    wanted = asked(max_tokens=40, stop_ids=(5,), early_stopping=EarlyStopping.WHEN_IMPOSSIBLE)
    issued = await start(bench, wanted)
    for attempt in range(1, 5):
        await more_heard(bench, 3)
        bench.decode.hand_over(bench.session, "r1", attempt)
        await more_requeued(bench, attempt - 1)
        at_rest = bench.session.of(Requeued)[-1].ticket
        assert at_rest.holder_id == issued.holder_id
        assert at_rest.beams.scores == tuple(sorted(at_rest.beams.scores, reverse=True))
        admit(bench, replace(at_rest, attempt=attempt + 1))
    assert await result(bench) == right(wanted)
    num_steps = len(heard(bench.session, "r1")) - len(right(wanted)) + 1
    assert bench.arena.num_computed == len(wanted.prompt_token_ids) + 4 * num_steps
    await bench.until_empty()


async def test_a_returned_search_goes_on_from_its_beams(bench: Bench) -> None:
    wanted = asked(stop_ids=(5,))
    await start(bench, wanted)
    await bench.until(lambda: len(heard(bench.session, "r1")) > 6)
    bench.decode.give_back()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    requeued = bench.session.of(Requeued)[0]
    assert requeued.reason is RequeueReason.DRAINING
    left = requeued.ticket
    assert len(left.sequences) == 4
    assert all(len(one.token_ids) > 6 and not one.block_ids for one in left.sequences)
    await bench.until_empty()
    await start(bench, replace(left, attempt=2, holder_id="h-again"))
    assert await result(bench) == right(wanted)
    await bench.until_empty()


async def test_searches_that_want_more_than_there_is_give_way_and_find_the_same(
    make_bench: MakeBench,
) -> None:
    """Also at the prefill worker, and more than once."""
    bench = await make_bench(num_blocks=40)
    tickets = {f"r{number}": asked(number, max_tokens=24) for number in (1, 2, 3)}
    for wanted in tickets.values():
        bench.prefill.submit(bench.session, wanted)
    num_seen, num_requeued, attempt = 0, 0, 1

    def all_found() -> bool:
        return all(hypotheses(heard(bench.session, one)) for one in tickets)

    while not all_found():
        await more_events(bench, num_seen)
        for event in bench.session.events[num_seen:]:
            num_seen += 1
            match event:
                case Prefilled(ticket):
                    admit(bench, ticket)
                case Requeued(ticket):
                    num_requeued, attempt = num_requeued + 1, attempt + 1
                    again = replace(ticket, attempt=attempt, holder_id=f"h-{attempt}")
                    bench.prefill.submit(bench.session, again)
    assert num_requeued > 0
    for request_id, wanted in tickets.items():
        assert hypotheses(heard(bench.session, request_id)) == right(wanted)
    await bench.until_empty()


async def test_a_step_waits_for_all_beams(make_bench: MakeBench) -> None:
    """Prompts and tokens are computed in chunks of 3 tokens: beams come to their ends at different
    times."""
    bench = await make_bench(num_blocks=160, max_num_batched_tokens=3, max_num_seqs=4)
    wanted = asked()
    first = await prefill(bench, wanted)
    again = replace(
        first.ticket,
        attempt=2,
        holder_id="h-2",
        holder_epoch=0,
        sequences=tuple(TicketSequence(s.index, s.token_ids) for s in first.ticket.sequences),
    )
    second = await prefill(bench, again)
    assert [len(one.token_ids) for one in second.ticket.sequences] == [2] * 4
    assert all(one.finish is FinishReason.LENGTH for one in right(wanted))
    bench.prefill.abort(FakeSession(), "r1", 1)
    bench.prefill.give_back()
    await bench.until_empty()


async def test_a_search_needs_a_slot_for_each_beam_that_it_may_have(bench: Bench) -> None:
    issued = (await prefill(bench, asked())).ticket
    assert issued.beams is not None
    one = replace(
        issued,
        sequences=issued.sequences[:1],
        beams=replace(issued.beams, scores=issued.beams.scores[:1]),
    )
    bench.decode.reserve(bench.session, *issued.key, 3)
    with pytest.raises(InvalidRequest, match="4 sequences for 3 slots"):
        bench.decode.admit(bench.session, one)
    num_free = bench.decode.load().num_free_slots
    bench.decode.abort(bench.session, *issued.key)
    bench.decode.reserve(bench.session, *issued.key, 5)
    bench.decode.admit(bench.session, one)
    assert bench.decode.load().num_free_slots == num_free + 3 - 4
    bench.decode.abort(bench.session, *issued.key)
    await bench.until_empty()


async def test_stop_conditions_do_not_end_a_beam(bench: Bench) -> None:
    """However early it is told to: the search could not go on with fewer."""
    wanted = asked()
    issued = await start(bench, wanted)
    for index in range(4):
        bench.decode.abort(bench.session, *issued.key, index)
    assert await result(bench) == right(wanted)
    await bench.until_empty()
