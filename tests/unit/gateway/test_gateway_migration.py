"""A request that moves to another decode worker, and its ticket at rest on the way."""

from dataclasses import replace

import pytest

from services.gateway.request import sending
from services.gateway.request.status import RequestStatus
from services.gateway.workers.lease import DecodeReservation
from services.protocol.messages import (
    Abort,
    HandOver,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
    Submit,
)
from services.protocol.ticket import FinishReason

from .walk import (
    MAX_TOKENS,
    ScriptedWorker,
    Walk,
    abort_detached,
    admitted_at,
    at_rest,
    expected,
    generated,
    requeued,
    step,
)


async def moving(walk: Walk) -> tuple[ScriptedWorker, DecodeReservation]:
    """The request runs, has been claimed, and has asked another decode worker for a slot."""
    await walk.until_decoding()
    assert walk.request.movable_from is None
    step(walk, 0)
    assert walk.request.movable_from is walk.decode
    other = ScriptedWorker("other")
    slot = sending.reserve_target(walk.request, other, "because d drains")
    assert other.sent == [Reserve("r1", 2)]
    return other, slot


async def test_a_running_request_moves_when_there_is_a_slot_for_it() -> None:
    """Nothing goes to prefill, and the request runs until the slot is granted."""
    walk = Walk()
    other, slot = await moving(walk)
    step(walk, 0)
    walk.on_event(other, Reserved("r1", 2, granted=True))
    assert sending.request_move(walk.request, slot)
    assert walk.decode.sent[-1] == HandOver("r1", 1)
    step(walk, 0)
    given = requeued(walk, at_rest(walk, 0))
    walk.on_event(walk.decode, given)
    assert given.ticket is not None
    assert admitted_at(other) == replace(given.ticket, attempt=2)
    assert (walk.decode.num_taken_slots, other.num_taken_slots) == (0, 1)
    assert walk.request.movable_from is None
    rest = expected(MAX_TOKENS)[4:]
    walk.on_event(other, generated(walk, *rest, finish=FinishReason.LENGTH))
    assert await walk.tokens() == expected(MAX_TOKENS)
    assert len([c for c in walk.prefill.sent if isinstance(c, Submit)]) == 1
    assert not [c for c in other.sent if isinstance(c, Abort)]
    aborts = [c for c in walk.decode.sent if isinstance(c, Abort)]
    assert aborts == [Abort("r1", 1)]  # its ticket is claimed
    assert other.num_taken_slots == 0


async def test_a_request_without_a_slot_elsewhere_keeps_running() -> None:
    walk = Walk()
    other, slot = await moving(walk)
    walk.on_event(other, Reserved("r1", 2, granted=False))
    assert not sending.request_move(walk.request, slot)
    assert walk.request.movable_from is walk.decode
    assert other.refused == 1
    assert other.num_taken_slots == 0
    assert walk.decode.num_taken_slots
    walk.request.close()


async def test_a_request_with_a_slot_elsewhere_runs_until_it_is_moved() -> None:
    """Other requests that move with it may have to wait for theirs. A preemption meanwhile loses
    the slot."""
    walk = Walk()
    other, slot = await moving(walk)
    walk.on_event(other, Reserved("r1", 2, granted=True))
    assert HandOver("r1", 1) not in walk.decode.sent
    walk.on_event(walk.decode, Requeued("r1", 1, RequeueReason.PREEMPTED))
    assert not sending.request_move(walk.request, slot)
    assert HandOver("r1", 1) not in walk.decode.sent
    assert other.num_taken_slots == 0
    walk.request.close()


@pytest.mark.parametrize("end", ["finished", "preempted", "cancelled", "lost"])
async def test_a_request_that_ends_during_a_move_releases_the_slot(end: str) -> None:
    walk = Walk()
    other, slot = await moving(walk)
    walk.on_event(other, Reserved("r1", 2, granted=True))
    assert sending.request_move(walk.request, slot)
    match end:
        case "finished":
            step(walk, 0, MAX_TOKENS - 2)
        case "preempted":
            walk.on_event(walk.decode, Requeued("r1", 1, RequeueReason.PREEMPTED))
        case "cancelled":
            walk.request.close()
        case "lost":
            walk.on_lost(walk.decode, died=True)
    assert Abort("r1", 2) in other.sent
    assert other.num_taken_slots == 0
    walk.request.close()


async def resting(walk: Walk) -> ScriptedWorker:
    """The ticket is at rest at a decode worker, and the request is in the queue, since its target
    is gone."""
    other, slot = await moving(walk)
    walk.on_event(other, Reserved("r1", 2, granted=True))
    assert sending.request_move(walk.request, slot)
    walk.on_lost(other, died=True)
    walk.on_event(walk.decode, requeued(walk, at_rest(walk, 0)))
    assert walk.request.status is RequestStatus.QUEUED
    assert walk.request.attempt.detached is not None
    issuer = walk.decode
    walk.decode = ScriptedWorker("next")
    return issuer


@pytest.mark.parametrize("how", ["taken back", "issuer lost", "given up", "cancelled"])
async def test_a_ticket_at_rest_that_is_gone_leaves_the_tokens(how: str) -> None:
    """The request is computed again; the issuer is told to release, unless it knows, or is gone."""
    walk = Walk()
    issuer = await resting(walk)
    match how:
        case "taken back":
            walk.on_event(issuer, Requeued("r1", 1, RequeueReason.STALE_TICKET))
        case "issuer lost":
            walk.on_lost(issuer, died=True)
        case "given up":
            abort_detached(walk)
        case "cancelled":
            walk.request.close()
    assert walk.request.attempt.detached is None
    assert (Abort("r1", 1) in issuer.sent) == (how in ("given up", "cancelled"))
    if how != "cancelled":
        again = await walk.until_prefilling()
        assert again.sequences[0].token_ids == tuple(expected(2))
        walk.request.close()


async def test_a_ticket_taken_back_when_it_was_sent_on_is_computed_again() -> None:
    walk = Walk()
    issuer = await resting(walk)
    assert await walk.reserve()
    sending.admit(walk.request)
    attempt = walk.request.attempt.number
    walk.on_event(issuer, Requeued("r1", 1, RequeueReason.PREEMPTED))
    assert walk.request.status is RequestStatus.QUEUED
    assert Abort("r1", attempt) in walk.decode.sent
    walk.request.close()
