"""The state machine of one request, with workers that a test plays."""

import asyncio
import time
from dataclasses import replace

import pytest

from services.gateway.output.output import MAX_UNREAD_TOKENS
from services.gateway.request import sending
from services.gateway.request.status import RequestStatus
from services.gateway.workers.worker import Worker
from services.protocol.messages import (
    Abort,
    Admit,
    Failed,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
)
from services.protocol.ticket import successor_holder_id
from services.runtime.errors import DeadlineExceeded, KVCorrupt, Overloaded

from .walk import MAX_TOKENS, ScriptedWorker, Walk, expected, generated, step


async def test_the_walk_from_queue_to_end() -> None:
    walk = Walk()
    await walk.until_decoding()
    assert walk.request.status is RequestStatus.DECODING
    step(walk, 0, MAX_TOKENS - 1)
    assert await walk.tokens() == expected(MAX_TOKENS)
    assert [type(command) for command in walk.decode.sent] == [Reserve, Admit]
    assert walk.host.ended == [None]
    assert walk.decode.num_taken_slots == 0
    assert not walk.prefill.prefill_loads


async def test_a_ticket_under_a_successor_of_its_holder_is_the_same() -> None:
    """The prefill worker found a wrong block in the cache and allocated again (law 6)."""
    walk = Walk()
    ticket = await walk.until_prefilling()
    ticket = replace(ticket, holder_id=successor_holder_id(successor_holder_id(ticket.holder_id)))
    walk.on_event(walk.prefill, walk.prefilled(ticket))
    assert walk.request.status is RequestStatus.DECODING
    assert walk.admitted.holder_id == ticket.holder_id


async def test_a_slot_that_is_granted_too_late_was_given_up() -> None:
    walk = Walk()
    assert not await sending.reserve(walk.request, walk.decode, timeout_s=0)
    assert walk.decode.sent == [Reserve("r1", 1), Abort("r1", 1)]
    walk.on_event(walk.decode, Reserved("r1", 1, granted=True))
    assert (walk.request.status, walk.request.attempt.number) == (RequestStatus.QUEUED, 2)


async def test_a_slot_granted_at_the_last_moment_is_taken() -> None:
    """A busy event loop sees the answer and the end of the time limit at once."""
    walk = Walk()
    asking = asyncio.create_task(sending.reserve(walk.request, walk.decode, timeout_s=0.002))
    await asyncio.sleep(0)
    granted = Reserved("r1", 1, granted=True)
    asyncio.get_running_loop().call_later(0.001, walk.on_event, walk.decode, granted)
    time.sleep(0.01)  # noqa: ASYNC251 - the loop is busy
    assert await asking
    assert walk.decode.sent == [Reserve("r1", 1)]
    assert walk.decode.num_taken_slots


async def test_cancelled_while_a_slot_is_asked_for() -> None:
    walk = Walk()
    asking = asyncio.create_task(sending.reserve(walk.request, walk.decode, timeout_s=5))
    await asyncio.sleep(0)
    walk.request.close()
    assert not await asking
    assert walk.decode.sent == [Reserve("r1", 1), Abort("r1", 1)]


async def test_a_worker_that_is_lost_while_it_is_asked_has_not_granted() -> None:
    walk = Walk()
    asking = asyncio.create_task(sending.reserve(walk.request, walk.decode, timeout_s=5))
    await asyncio.sleep(0)
    walk.on_event(walk.decode, Reserved("r1", 1, granted=True))
    walk.on_lost(walk.decode, died=True)
    assert not await asking
    assert (walk.request.status, walk.request.attempt.number) == (RequestStatus.QUEUED, 2)
    assert walk.decode.num_taken_slots == 0


async def test_events_at_the_wrong_time_or_of_others_are_dropped() -> None:
    walk = Walk()
    other = ScriptedWorker("other")
    ticket = await walk.until_prefilling()
    dropped: list[tuple[Worker, RequestEvent]] = [
        (walk.decode, generated(walk, 5)),  # not admitted yet
        (walk.decode, Reserved("r1", 1, granted=False)),  # answered before
        (walk.decode, walk.prefilled(ticket)),  # not the one that has it
        (other, walk.prefilled(ticket)),
        (other, Requeued("r1", 1, RequeueReason.PREEMPTED)),
        (other, Failed("r1", 1, "kv_corrupt", "no")),
        (walk.prefill, Requeued("r1", 2, RequeueReason.PREEMPTED)),  # another attempt
    ]
    for sender, event in dropped:
        walk.on_event(sender, event)
    assert walk.request.status is RequestStatus.PREFILLING
    walk.on_event(walk.prefill, walk.prefilled(ticket))
    walk.on_event(walk.prefill, walk.prefilled(ticket))  # said twice
    walk.on_event(other, generated(walk, 5))  # not the one that runs it
    walk.on_event(walk.prefill, generated(walk, 5))
    walk.request.close()
    assert await walk.tokens() == expected(1)


async def test_a_workers_error_is_the_clients() -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.on_event(walk.decode, Failed("r1", 1, "kv_corrupt", "block 9 is not itself"))
    with pytest.raises(KVCorrupt, match="block 9 is not itself"):
        await walk.tokens()
    assert Abort("r1", 1) not in walk.decode.sent


async def test_the_deadline_ends_it_wherever_it_is() -> None:
    walk = Walk(timeout_s=0.2)
    await walk.until_decoding()
    with pytest.raises(DeadlineExceeded):
        await walk.tokens()
    assert Abort("r1", 1) in walk.decode.sent
    assert Abort("r1", 1) in walk.prefill.sent


async def test_a_ticket_goes_on_with_what_is_left_of_the_deadline() -> None:
    walk = Walk(timeout_s=10)
    assert await walk.reserve()
    old = replace(walk.start(), timeout_ms=60_000)
    walk.on_event(walk.prefill, walk.prefilled(old))
    assert 0 < walk.admitted.timeout_ms <= 10_000
    walk.request.close()


async def test_no_stage_is_skipped() -> None:
    walk = Walk()
    with pytest.raises(RuntimeError, match="queued cannot become prefilling"):
        walk.start()


async def test_a_client_that_does_not_read_is_cancelled() -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.on_event(walk.decode, generated(walk, *[7] * MAX_UNREAD_TOKENS))
    assert isinstance(walk.host.ended[0], Overloaded)
    assert walk.decode.sent[-1] == Abort("r1", 1)
    with pytest.raises(Overloaded, match="too slowly"):
        await walk.tokens()
