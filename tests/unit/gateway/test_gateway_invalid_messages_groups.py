"""Impossible events about a request with several sequences."""

from dataclasses import replace

import pytest

from services.gateway.request.status import RequestStatus
from services.protocol.messages import Abort, Generated
from services.protocol.ticket import FinishReason, TicketSequence

from .walk import PROMPT, Walk, at_rest, requeued, step

WRONG = {
    "none of one": lambda event: replace(event, outputs=event.outputs[:1]),
    "twice one": lambda event: replace(event, outputs=(event.outputs[0],) * 2),
    "of another request": lambda event: replace(
        event, outputs=(event.outputs[0], replace(event.outputs[1], request_id="r2"))
    ),
    "two tokens": lambda event: replace(
        event, outputs=(event.outputs[0], replace(event.outputs[1], token_ids=(1, 2)))
    ),
    "one of a sequence of the ticket": lambda event: replace(
        event, ticket=replace(event.ticket, sequences=event.ticket.sequences[:1])
    ),
    "the tokens swapped": lambda event: replace(
        event,
        ticket=replace(
            event.ticket,
            sequences=tuple(
                replace(there, token_ids=other.token_ids)
                for there, other in zip(
                    event.ticket.sequences, event.ticket.sequences[::-1], strict=True
                )
            ),
        ),
    ),
    "no blocks of one": lambda event: replace(
        event,
        ticket=replace(
            event.ticket,
            sequences=(
                event.ticket.sequences[0],
                replace(event.ticket.sequences[1], block_ids=(), num_computed_tokens=0),
            ),
        ),
    ),
    "one that ends and goes on": lambda event: replace(
        event,
        outputs=(replace(event.outputs[0], finish_reason=FinishReason.STOP), event.outputs[1]),
    ),
    "one too many": lambda event: replace(
        event,
        ticket=replace(
            event.ticket, sequences=(*event.ticket.sequences, TicketSequence(2, (1,), (9,), 3))
        ),
    ),
}


@pytest.mark.parametrize("corrupt", WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_answer_to_a_group_is_dropped(corrupt: object) -> None:
    walk = Walk(num_sequences=2)
    assert await walk.reserve()
    event = walk.prefilled(walk.start())
    assert callable(corrupt)
    walk.on_event(walk.prefill, corrupt(event))
    assert walk.lifecycle.status is RequestStatus.QUEUED
    assert all(not sequence.tokens for sequence in walk.output.sequences)
    assert Abort("r1", 1) in walk.prefill.sent
    walk.lifecycle.close()


async def test_a_step_of_a_sequence_that_there_is_not_sets_back() -> None:
    walk = Walk(num_sequences=2)
    await walk.until_decoding()
    walk.on_event(
        walk.decode, Generated("r1", walk.lifecycle.attempt.number, 2, len(PROMPT) + 1, (5,), None)
    )
    assert walk.lifecycle.status is RequestStatus.QUEUED
    walk.lifecycle.close()


async def test_a_ticket_at_rest_lacks_none_that_goes_on() -> None:
    walk = Walk(num_sequences=2)
    await walk.until_decoding()
    for index in range(2):
        step(walk, index)
    walk.on_event(walk.decode, requeued(walk, at_rest(walk, 1)))
    assert (walk.lifecycle.status, walk.lifecycle.attempt.detached) == (RequestStatus.QUEUED, None)
    walk.lifecycle.close()
