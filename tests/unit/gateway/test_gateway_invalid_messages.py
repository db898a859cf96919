"""Impossible events of a worker: the request is set back, and its client keeps its tokens."""

import asyncio
from dataclasses import replace

import pytest

from services.gateway.request.status import RequestStatus
from services.protocol.messages import Abort, Failed, Requeued, RequeueReason
from services.protocol.ticket import FinishReason
from services.runtime.errors import DuplicateRequest, InvalidRequest

from .walk import MAX_TOKENS, Walk, expected, generated


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [
        ([], None),
        ([256], None),
        (expected(MAX_TOKENS)[1:], None),
        ([*expected(MAX_TOKENS)[1:], 5], FinishReason.LENGTH),
    ],
    ids=["none", "not in the vocabulary", "the last, and no end", "more than asked for"],
)
async def test_impossible_tokens_never_reach_the_client(
    tokens: list[int], finish: FinishReason | None
) -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.on_event(walk.decode, generated(walk, *tokens, finish=finish))
    assert walk.lifecycle.status is RequestStatus.QUEUED
    assert walk.output.sequences[0].tokens == expected(1)


async def test_a_ticket_that_is_refused_is_computed_again() -> None:
    """The ticket belongs to the worker that issued it, not to the client. Once it is claimed, the
    error of the worker that runs it is about the request."""
    walk = Walk()
    await walk.until_decoding()
    refused = Failed(
        "r1", walk.lifecycle.attempt.number, "invalid_request", "not those of its holder"
    )
    walk.on_event(walk.decode, refused)
    assert walk.lifecycle.status is RequestStatus.QUEUED
    assert walk.prefill.sent[-1] == Abort("r1", 1)
    assert walk.decode.num_taken_slots == 0
    ticket = await walk.until_decoding()
    assert ticket.sequences[0].token_ids == tuple(expected(1))
    walk.on_event(walk.decode, generated(walk, *expected(3)[2:]))
    walk.on_event(walk.decode, replace(refused, attempt=walk.lifecycle.attempt.number))
    assert isinstance(walk.host.ended[0], InvalidRequest)


async def test_a_ticket_that_nobody_was_sent_is_refused() -> None:
    """From a worker that was only asked for a slot."""
    walk, other = Walk(), Walk()
    await other.until_decoding()
    rest = other.lifecycle.attempt.detached
    assert rest is not None
    asking = asyncio.create_task(walk.lifecycle.reserve(walk.decode, timeout_s=5))
    await asyncio.sleep(0)
    asked = replace(rest.ticket, attempt=walk.lifecycle.attempt.number)
    handed_over = Requeued("r1", walk.lifecycle.attempt.number, RequeueReason.HANDED_OVER, asked)
    walk.on_event(walk.decode, handed_over)
    assert not await asking
    assert walk.lifecycle.status is RequestStatus.QUEUED
    assert not walk.host.ended


async def test_a_request_goes_on_only_for_the_same_model() -> None:
    """The token ids of one model mean nothing to another."""
    walk = Walk()
    request = replace(walk.lifecycle.client.request, model="another", received=())
    with pytest.raises(DuplicateRequest):
        walk.lifecycle.resume(request, walk.output)
