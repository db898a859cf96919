"""A beam search at the gateway, whose workers a test plays; and its parameters."""

from dataclasses import replace
from typing import Any

import pytest

from quire.types import Beam
from services.gateway.api import GenerationRequest, RequestedSampling
from services.gateway.chat.admission import check_received
from services.gateway.chat.beams import resolve_beam
from services.gateway.output.delta import Delta, Received
from services.gateway.request.status import RequestStatus
from services.protocol.messages import (
    Generated,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserve,
    Submit,
)
from services.protocol.ticket import (
    BeamState,
    FinishReason,
    Hypothesis,
    Ticket,
    TicketSequence,
)
from services.runtime.errors import InvalidRequest

from .walk import MAX_TOKENS, PROMPT, Walk

FOUND = ((5, 6, 7, 8, 9, 10), (5, 6, 2))


def searching() -> Walk:
    return Walk(num_sequences=2, beam=Beam(3))


def begun(ticket: Ticket, num_tokens: int = 1, **changes: Any) -> Ticket:
    """Three living beams and one finished hypothesis."""
    sequences = tuple(
        TicketSequence(index, (5 + index,) * num_tokens, (9,), len(PROMPT) + num_tokens - 1)
        for index in range(3)
    )
    state = BeamState((-1.0, -1.5, -2.0), (Hypothesis((2,), -3.0, FinishReason.STOP),))
    fields = {"holder_epoch": 2, "sequences": sequences, "beams": state}
    return replace(ticket, **{**fields, **changes})


def goes_on(walk: Walk) -> Generated:
    return Generated("r1", walk.request.attempt.number, 0, len(PROMPT), (), None)


def found(walk: Walk, *indices: int) -> list[Generated]:
    finish = (FinishReason.LENGTH, FinishReason.STOP)
    position, attempt = len(PROMPT), walk.request.attempt.number
    return [
        Generated("r1", attempt, index, position, FOUND[index], finish[index], score=-0.5 - index)
        for index in indices
    ]


async def until_searching(walk: Walk) -> Ticket:
    ticket = await walk.until_prefilling()
    walk.on_event(walk.prefill, Prefilled(begun(ticket), ()))
    assert walk.request.status is RequestStatus.DECODING
    return ticket


async def deltas(walk: Walk) -> list[Delta]:
    return [delta async for delta in walk.output]


async def test_hypotheses_come_at_the_end_with_their_scores() -> None:
    walk = searching()
    ticket = await until_searching(walk)
    assert ticket.sequences == (TicketSequence(0),)
    assert walk.decode.sent[0] == Reserve("r1", 1, num_sequences=3)
    assert walk.admitted.sequences == begun(ticket).sequences
    for event in [goes_on(walk), *found(walk, 0, 1)]:
        walk.on_event(walk.decode, event)
    first, second = await deltas(walk)
    assert (first.token_ids, first.score, first.finish_reason) == (
        *(FOUND[0], -0.5),
        FinishReason.LENGTH,
    )
    assert (second.token_ids, second.score, second.finish_reason) == (
        *(FOUND[1], -1.5),
        FinishReason.STOP,
    )
    assert second.usage is not None
    assert walk.host.ended == [None]
    assert walk.decode.num_taken_slots == 0


async def test_a_search_that_ends_with_its_first_tokens() -> None:
    walk = searching()
    assert await walk.reserve()
    over = replace(walk.start(), sequences=())
    walk.on_event(walk.prefill, Prefilled(over, tuple(found(walk, 0, 1))))
    assert [delta.token_ids for delta in await deltas(walk)] == list(FOUND)


async def test_a_move_is_settled_once_the_worker_goes_on() -> None:
    walk = searching()
    await until_searching(walk)
    assert walk.request.movable_from is None
    walk.on_event(walk.decode, goes_on(walk))
    assert walk.request.movable_from is walk.decode
    assert walk.request.num_sequences == 3


@pytest.mark.parametrize("reason", [RequeueReason.PREEMPTED, RequeueReason.DRAINING])
async def test_a_returned_search_goes_on_from_its_beams(reason: RequeueReason) -> None:
    walk = searching()
    ticket = await until_searching(walk)
    left = begun(ticket, 4, holder_epoch=0)
    left = replace(left, sequences=tuple(replace(s, block_ids=()) for s in left.sequences))
    walk.on_event(walk.decode, Requeued("r1", 1, reason, left))
    assert walk.request.status is RequestStatus.QUEUED
    again = await walk.until_prefilling()
    assert [one.token_ids for one in again.sequences] == [(5,) * 4, (6,) * 4, (7,) * 4]
    assert again.beams == left.beams
    assert not any(one.block_ids for one in again.sequences)


async def test_a_search_lost_with_its_worker_restarts_at_its_last_ticket() -> None:
    walk = searching()
    await until_searching(walk)
    walk.on_lost(walk.decode, died=True)
    again = await walk.until_prefilling()
    assert [one.token_ids for one in again.sequences] == [(5,), (6,), (7,)]
    submit = walk.prefill.sent[-1]
    assert isinstance(submit, Submit)
    assert submit.ticket.beams is not None


def test_received_hypotheses_are_complete() -> None:
    """The tokens of half a sequence cannot be continued."""
    sampling = RequestedSampling(n=2, beam=Beam(2))
    half, whole = Received(0, (5,)), Received(0, (5,), FinishReason.STOP)
    request = GenerationRequest(PROMPT, "r1", sampling=sampling, received=(whole,))
    check_received(request, MAX_TOKENS, 0.0, 256)
    with pytest.raises(InvalidRequest, match="sends whole sequences"):
        check_received(replace(request, received=(half,)), MAX_TOKENS, 0.0, 256)


def test_absent_fields_take_transformers_defaults() -> None:
    asked = RequestedSampling(beam=Beam(4), n=2)
    assert resolve_beam(asked) == Beam(4, 1.0, early_stopping=False)
    assert resolve_beam(RequestedSampling()) is None


@pytest.mark.parametrize(
    "harmless",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": -1}, {"top_p": 1.0}, {"min_p": 0.0}],
)
def test_parameters_without_effect_are_accepted(harmless: dict[str, Any]) -> None:
    asked = RequestedSampling(beam=Beam(4), **harmless)
    assert resolve_beam(asked) is not None


@pytest.mark.parametrize(
    ("beam", "others", "problem"),
    [
        (Beam(0), {}, "width of 0, not in"),
        (Beam(17), {}, "width of 17, not in"),
        (Beam(2), {"n": 3}, "n is 3, the beam width only 2"),
        (Beam(2, 4.5), {}, "length_penalty is 4.5"),
        (Beam(2, float("nan")), {}, "length_penalty is nan"),
        (Beam(2), {"temperature": 0.7}, "temperature is 0.7: a beam search"),
        (Beam(2), {"top_k": 5}, "top_k is 5"),
        (Beam(2), {"top_p": 0.9}, "top_p is 0.9"),
        (Beam(2), {"min_p": 0.1}, "min_p is 0.1"),
        (Beam(2), {"stop": ("a",)}, "stop is"),
    ],
)
def test_contradictory_parameters_are_refused(
    beam: Beam, others: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        resolve_beam(RequestedSampling(beam=beam, **others))
