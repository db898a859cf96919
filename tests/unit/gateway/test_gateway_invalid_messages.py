"""Impossible events of a worker: the request is set back, and its client keeps its tokens."""

from dataclasses import replace

import pytest

from services.gateway.request import resuming
from services.gateway.request.status import RequestStatus
from services.protocol.messages import Abort, Failed
from services.runtime.errors import DuplicateRequest, InvalidRequest

from .walk import Walk, expected, generated


@pytest.mark.parametrize(("skip", "index"), [(1, 0), (-1, 0), (0, 2)])
async def test_lost_or_repeated_tokens_never_reach_the_client(skip: int, index: int) -> None:
    walk = Walk(num_sequences=2)
    await walk.until_decoding()
    event = generated(walk, expected(2)[1], skip=skip)
    walk.on_event(walk.decode, replace(event, index=index))
    assert walk.request.status is RequestStatus.QUEUED
    assert walk.output.sequences[0].tokens == expected(1)


@pytest.mark.parametrize("lacks", ["an output", "a sequence", "a token"])
async def test_a_ticket_has_the_tokens_of_all_sequences(lacks: str) -> None:
    walk = Walk(num_sequences=2)
    assert await walk.reserve()
    event = walk.prefilled(walk.start())
    first, second = event.ticket.sequences
    match lacks:
        case "an output":
            event = replace(event, outputs=event.outputs[:1])
        case "a sequence":
            event = replace(event, ticket=replace(event.ticket, sequences=(first,)))
        case "a token":
            without = first, replace(second, token_ids=())
            event = replace(event, ticket=replace(event.ticket, sequences=without))
    walk.on_event(walk.prefill, event)
    assert walk.request.status is RequestStatus.QUEUED
    assert all(not sequence.tokens for sequence in walk.output.sequences)
    assert Abort("r1", 1) in walk.prefill.sent
    walk.request.close()


async def test_a_ticket_that_is_refused_is_computed_again() -> None:
    """The ticket belongs to the worker that issued it, not to the client. Once it is claimed, the
    error of the worker that runs it is about the request."""
    walk = Walk()
    await walk.until_decoding()
    refused = Failed("r1", walk.request.attempt.number, "invalid_request", "not its holder's")
    walk.on_event(walk.decode, refused)
    assert walk.request.status is RequestStatus.QUEUED
    assert walk.prefill.sent[-1] == Abort("r1", 1)
    assert walk.decode.num_taken_slots == 0
    ticket = await walk.until_decoding()
    assert ticket.sequences[0].token_ids == tuple(expected(1))
    walk.on_event(walk.decode, generated(walk, *expected(3)[2:]))
    walk.on_event(walk.decode, replace(refused, attempt=walk.request.attempt.number))
    assert isinstance(walk.host.ended[0], InvalidRequest)


async def test_a_request_goes_on_only_for_the_same_model() -> None:
    """The token ids of one model mean nothing to another."""
    walk = Walk()
    call = walk.call(())
    call.model = "another"
    with pytest.raises(DuplicateRequest):
        resuming.resume(walk.request, call)
