"""A gateway is told that its request begins before it is computed; suspects begin one at a time."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.protocol.messages import Prefilled, Requeued
from services.protocol.ticket import Ticket
from services.worker.requests.jobs import State

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT, FakeSession, expected, ticket
from .runs import finished, prefill, tokens


async def admit(
    pair: WorkerPair, session: FakeSession, number: int, *, suspect: bool = False
) -> Ticket:
    """A request with a slot, and a ticket that the decode worker has claimed."""
    asked = ticket(f"r{number}", range(100 * number, 100 * number + 10), max_tokens=4)
    issued = await prefill(pair, asked)
    pair.decode.role.reserve(session, *issued.key, 1)
    pair.decode.role.admit(session, issued, suspect=suspect)
    job = pair.decode.role.jobs.get(session, *issued.key)
    assert job is not None
    await pair.until(lambda: job.state is not State.CLAIMING)
    return issued


@dataclass
class HeldUp:
    reached: asyncio.Event
    over: asyncio.Event


def hold_up(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch, operation: str) -> HeldUp:
    """The store carries the call out, and its answer waits until the delay is `over`."""
    held, act = HeldUp(asyncio.Event(), asyncio.Event()), getattr(pair.store, operation)

    async def slowly(*args: Any) -> Any:
        answer = await act(*args)
        held.reached.set()
        await held.over.wait()
        return answer

    monkeypatch.setattr(pair.store, operation, slowly)
    return held


async def test_no_sequence_is_computed_before_its_gateway_knows(pair: WorkerPair) -> None:
    """So whatever a step does to its worker, the gateway knows the requests in it."""
    session = FakeSession()
    session.reads = False
    pair.prefill.role.submit(session, ticket("r1", PROMPT))
    await pair.until(lambda: session.began == ["r1"])
    other = FakeSession()
    pair.prefill.role.submit(other, ticket("r2", (1, 2, 3)))
    await pair.until(lambda: bool(other.of(Prefilled)))  # a step has run meanwhile
    assert pair.arena.num_computed == 3
    assert not session.events
    session.read()
    await pair.until(lambda: bool(session.of(Prefilled)))
    assert pair.arena.num_computed == 13


async def test_no_sequence_is_decoded_before_its_gateway_knows(pair: WorkerPair) -> None:
    session = FakeSession()
    session.reads = False
    issued = await admit(pair, session, 1)
    await pair.until(lambda: session.began == ["r1"])
    other = FakeSession()
    await admit(pair, other, 2)
    await pair.until(lambda: finished(other, "r2"))
    assert tokens(session, issued) == [*issued.sequences[0].token_ids]
    session.reads = True
    session.read()
    await pair.until(lambda: finished(session, "r1"))
    assert tokens(session, issued) == expected(issued.prompt_token_ids, 4)
    await pair.until_empty()


async def test_a_sequence_waiting_for_a_lost_store_has_not_begun(pair: WorkerPair) -> None:
    """Neither has one that finds no blocks."""
    session = FakeSession()
    filler = await pair.store.allocate("pool", "filler", pair.prefill.worker_id, 1, (), 30)
    pair.prefill.role.submit(session, ticket("r2", PROMPT))
    await pair.until(lambda: bool(pair.store.ledger("pool").stats().num_waiters))
    assert not session.began
    await pair.store.release("pool", "filler", filler.epoch)
    await pair.until(lambda: session.began == ["r2"])


async def test_suspects_are_begun_one_at_a_time_whoever_sends_them(pair: WorkerPair) -> None:
    """The second begins when the first has a token, the third when the second is cancelled; other
    requests are not delayed."""
    pair.decode_model.gate.clear()
    sessions = [FakeSession() for _ in range(4)]
    issued = [
        await admit(pair, session, number, suspect=number < 4)
        for number, session in enumerate(sessions, 1)
    ]
    first, second, third, free = sessions
    await pair.until(lambda: (first.began, free.began) == (["r1"], ["r4"]))
    assert not second.began
    assert not third.began
    pair.decode_model.pause_after = pair.decode_model.num_steps + 1
    pair.decode_model.gate.set()
    await pair.until(lambda: second.began == ["r2"])
    assert not third.began
    pair.decode.role.abort(second, *issued[1].key)
    pair.decode_model.gate.set()
    await pair.until(lambda: finished(third, "r3"))
    await pair.until(lambda: finished(first, "r1") and finished(free, "r4"))
    for number in (0, 2, 3):
        assert tokens(sessions[number], issued[number]) == expected(
            issued[number].prompt_token_ids, 4
        )
    await pair.until_empty()


async def test_suspected_prompts_are_begun_one_at_a_time(pair: WorkerPair) -> None:
    pair.prefill_model.gate.clear()
    session = FakeSession()
    for number in (1, 2, 3):
        asked = ticket(f"r{number}", range(100 * number, 100 * number + 10))
        pair.prefill.role.submit(session, asked, suspect=True)
    await pair.until(lambda: pair.prefill_model.num_begun == 1)
    assert session.began == ["r1"]
    pair.prefill_model.gate.set()
    await pair.until(lambda: len(session.of(Prefilled)) == 3)
    assert session.began == ["r1", "r2", "r3"]


@pytest.mark.parametrize("how", ["aborted", "gateway gone", "handed over"])
async def test_a_suspect_that_leaves_the_queue_leaves_nothing(pair: WorkerPair, how: str) -> None:
    """It also does not delay the suspects after it."""
    pair.decode_model.gate.clear()
    sessions = [FakeSession() for _ in range(3)]
    issued = [
        await admit(pair, session, number, suspect=True)
        for number, session in enumerate(sessions, 1)
    ]
    first, second, third = sessions
    await pair.until(lambda: first.began == ["r1"])
    match how:
        case "aborted":
            pair.decode.role.abort(second, *issued[1].key)
        case "gateway gone":
            pair.decode.role.close(second)
        case "handed over":
            pair.decode.role.hand_over(second, *issued[1].key)
    pair.decode_model.gate.set()
    await pair.until(lambda: finished(third, "r3"))
    assert not second.began
    if how == "handed over":
        await pair.until(lambda: bool(second.of(Requeued)))
        (requeued,) = second.events[1:]
        detached: Ticket = replace(requeued.ticket, attempt=2)  # type: ignore[union-attr, type-var, assignment]
        pair.decode.role.reserve(second, *detached.key, 1)
        pair.decode.role.admit(second, detached)
        await pair.until(lambda: finished(second, "r2"))
    await pair.until_empty()


@pytest.mark.parametrize("max_tokens", [1, 4], ids=["ends", "goes on"])
async def test_a_later_sequence_begins_when_the_gateway_has_the_token(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """However long the store takes: the later one may kill at once, and its predecessor would be
    suspected."""
    session = FakeSession()
    held = hold_up(pair, monkeypatch, "release" if max_tokens == 1 else "detach")
    for number in (1, 2):
        asked = ticket(f"r{number}", range(100 * number, 100 * number + 10), max_tokens=max_tokens)
        pair.prefill.role.submit(session, asked, suspect=True)
    await held.reached.wait()
    assert session.sent == ["Began r1"]
    held.over.set()
    await pair.until(lambda: len(session.of(Prefilled)) == 2)
    assert session.sent == ["Began r1", "Prefilled r1", "Began r2", "Prefilled r2"]


async def test_a_later_sequence_begins_when_the_gateway_has_the_preemption(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession()
    held = hold_up(pair, monkeypatch, "release")
    pair.prefill_model.pause_after = 1
    pair.prefill.role.submit(session, ticket("r1", range(100, 140)), suspect=True)
    pair.prefill.role.submit(session, ticket("r2", PROMPT), suspect=True)
    await pair.until(lambda: pair.prefill_model.num_begun == 2)
    pair.prefill.role.preempt(["h-r1"])
    pair.prefill_model.gate.set()
    await held.reached.wait()
    assert session.sent == ["Began r1"]
    held.over.set()
    await pair.until(lambda: bool(session.of(Prefilled)))
    assert session.sent == ["Began r1", "Requeued r1", "Began r2", "Prefilled r2"]


async def test_a_later_sequence_begins_when_the_gateway_has_the_decoded_token(
    pair: WorkerPair,
) -> None:
    pair.decode_model.gate.clear()
    session = FakeSession()
    for number in (1, 2):
        await admit(pair, session, number, suspect=True)
    pair.decode_model.gate.set()
    await pair.until(lambda: finished(session, "r1") and finished(session, "r2"))
    assert session.sent.index("Step r1") < session.sent.index("Began r2")


@pytest.mark.parametrize("how", ["preempted", "swapped", "handed over"])
async def test_a_later_sequence_begins_when_the_gateway_has_the_ticket(
    make_pair: MakePair, how: str
) -> None:
    pair = await make_pair(num_swap_blocks=16 if how == "swapped" else 0)
    session = FakeSession()
    session.reads = False
    issued = await admit(pair, session, 1, suspect=True)
    await admit(pair, session, 2, suspect=True)
    if how == "handed over":
        pair.decode.role.hand_over(session, *issued.key)
    else:
        pair.decode.role.preempt([issued.holder_id])
    await pair.until(lambda: "r2" in session.began)
    of_r1 = [event for event in session.sent if event.endswith("r1")]
    assert session.sent.index("Requeued r1") < session.sent.index("Began r2")
    assert of_r1 == ["Reserved r1", "Began r1", "Requeued r1"]
    (requeued,) = session.of(Requeued)
    assert (requeued.ticket is None) == (how == "preempted")
    if requeued.ticket:
        assert bool(requeued.ticket.swapped) == (how == "swapped")
        assert bool(requeued.ticket.sequences[0].block_ids) == (how == "handed over")
