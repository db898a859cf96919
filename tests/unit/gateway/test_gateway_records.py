"""The figures and the events of a request, and the bounds of what is kept of ended ones."""

import time
import tracemalloc
from copy import deepcopy
from itertools import count

import pytest

from services.gateway.access.caller import EVERYONE, LOCAL_OPERATOR, Caller
from services.gateway.output.output import RequestStats
from services.gateway.request import records as records_module
from services.gateway.request.events import (
    BlocksAwaited,
    Computed,
    Entered,
    Event,
    Moved,
    Phase,
    Preempted,
    SetBack,
)
from services.gateway.request.record import Record
from services.gateway.request.records import Records
from services.protocol.messages import AwaitsBlocks, Began, Requeued, RequeueReason, Reserved
from services.protocol.ticket import FinishReason
from services.runtime.errors import Unavailable

from .test_gateway_migration import moving
from .test_gateway_story import PLACED, WAITED
from .walk import MAX_TOKENS, Walk, at_rest, requeued, step


def events_of(walk: Walk, *kinds: type[Event]) -> list[Event]:
    return [event for _, event in walk.request.record.events if isinstance(event, kinds)]


async def run(walk: Walk) -> None:
    """To the end, through a preemption."""
    ticket = await walk.until_prefilling()
    walk.on_event(walk.prefill, AwaitsBlocks("r1", 1, 4, 1))
    walk.on_event(walk.prefill, Began("r1", 1))
    walk.on_event(walk.prefill, walk.prefilled(ticket))
    step(walk, 0)
    walk.on_event(walk.decode, Requeued("r1", 1, RequeueReason.PREEMPTED))
    again = await walk.until_prefilling()
    walk.on_event(walk.prefill, Began("r1", again.attempt))
    walk.on_event(walk.prefill, walk.prefilled(again))
    step(walk, 0, MAX_TOKENS - 3)


async def test_the_figures_add_up_to_the_whole() -> None:
    walk = Walk()
    walk.output.metrics = walk.request.record.metrics
    await run(walk)
    async for delta in walk.output:
        last = delta
    assert last.usage is not None
    metrics = last.usage.metrics
    assert metrics is not None
    parts = metrics.queue_ms + metrics.prefill_ms + metrics.handoff_ms + metrics.decode_ms
    assert parts == pytest.approx(walk.request.record.age_s * 1000, abs=0.01)
    assert metrics.placement == ("p", "d", "p", "d")
    assert (metrics.preemptions, metrics.moves) == (1, 0)
    assert metrics.queue_time_ms <= metrics.queue_ms
    whole = metrics.queue_time_ms + metrics.time_to_first_token_ms
    assert whole == pytest.approx(last.usage.time_to_first_token_ms, abs=5)
    assert metrics.mean_itl_ms == pytest.approx(metrics.generation_time_ms / 5, abs=0.01)


async def test_several_sequences_have_no_time_between_tokens() -> None:
    walk = Walk(num_sequences=2)
    await walk.until_decoding()
    assert walk.request.record.metrics().mean_itl_ms is None
    walk.request.close()


async def test_decisions_are_noted_with_their_causes() -> None:
    walk = Walk()
    await run(walk)
    assert events_of(walk, BlocksAwaited, Computed, Preempted) == [
        BlocksAwaited("p", 4, 1, (("r2", 30),)),
        Computed(3, 0),
        Preempted("d", False, (("r2", 30),)),
        Computed(5, 0),
    ]


async def test_a_move_is_noted_with_its_cause() -> None:
    walk = Walk()
    other, _ = await moving(walk)
    walk.on_event(other, Reserved("r1", 2, granted=True))
    walk.on_event(walk.decode, requeued(walk, at_rest(walk, 0)))
    assert events_of(walk, Moved) == [Moved("d", other.id, "because d drains")]
    assert walk.request.record.phase is Phase.MOVING
    walk.request.close()


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (RequeueReason.DRAINING, "d drains"),
        (RequeueReason.STALE_TICKET, "its ticket was not there any more when it was claimed"),
    ],
)
async def test_a_set_back_is_noted(reason: RequeueReason, why: str) -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.on_event(walk.decode, Requeued("r1", 1, reason))
    assert events_of(walk, SetBack) == [SetBack(why)]
    walk.request.close()


def test_the_first_events_of_many_are_forgotten_but_not_their_times() -> None:
    one = Record("r1", EVERYONE, RequestStats(50, 0.0), arrived_at=time.monotonic() - 1.0)
    for _ in range(100):
        one.enter(Phase.PREEMPTED)
        one.enter(Phase.PREFILL, "p")
    one.end(FinishReason.STOP, None)
    assert (len(one.events), one.num_forgotten) == (64, 137)
    assert one.placement == ["p"]
    metrics = one.metrics()
    assert metrics.queue_ms >= 1000
    assert metrics.queue_ms + metrics.prefill_ms == pytest.approx(one.age_s * 1000, abs=0.01)


@pytest.mark.parametrize(
    ("finish", "error", "outcome", "reason"),
    [
        (FinishReason.STOP, None, "stop", ""),
        (None, Unavailable("gone"), "unavailable", "gone"),
        (None, ValueError("a secret"), "internal", ""),
        (None, None, "cancelled", ""),
    ],
)
def test_the_end_has_an_outcome_and_no_internals(
    finish: FinishReason | None, error: Exception | None, outcome: str, reason: str
) -> None:
    one = Record("r1", EVERYONE)
    one.end(finish, error)
    assert (one.outcome, one.reason) == (outcome, reason)


def ended(name: str, *events: Event, hashes: bytes = b"") -> Record:
    one = Record(name, Caller("alice"), hashes=hashes)
    for event in events:
        one.note(event)
    return one


def test_a_record_replaces_that_of_the_same_client_and_id() -> None:
    kept = Records()
    kept.add(ended("r1"))
    kept.add(Record("r1", Caller("bob"), outcome="queue_full"))
    kept.add(ended("r1", WAITED))
    assert [(each.caller.key, len(each.events)) for each in kept] == [("alice", 2), ("bob", 1)]


def test_records_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate of a record's memory is above what it takes."""
    monkeypatch.setattr(records_module, "MAX_BYTES", 4 << 20)
    kept, numbers = Records(), count()

    def add_many(number: int, *events: Event) -> None:
        for _ in range(number):
            kept.add(ended(f"r{next(numbers)}", *map(deepcopy, events), hashes=bytes(2048)))

    add_many(5000)
    assert len(kept) < 4096
    tracemalloc.start()
    try:
        add_many(300, *(PLACED, WAITED, Entered(Phase.PREFILL, "p")) * 15)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 4 << 20
    assert next(iter(kept)).request_id == f"r{next(numbers) - 1}"


@pytest.mark.parametrize(
    ("caller", "sees"),
    [
        (Caller("alice"), True),
        (Caller("bob"), False),
        (Caller(host="192.0.2.1"), False),
        (Caller("root", is_operator=True), True),
        (LOCAL_OPERATOR, True),
    ],
)
def test_a_key_sees_its_own_requests_and_an_operator_all(caller: Caller, sees: bool) -> None:
    assert ended("r1").is_visible_to(caller) is sees
