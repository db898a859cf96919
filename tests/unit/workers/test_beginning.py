"""A gateway hears that its request is begun before it is; of suspects, one at a time."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.decode.job import State
from services.protocol.ticket import Ticket
from services.worker.events import Prefilled, Requeued

from .conftest import Bench, MakeBench
from .fakes import PROMPT, FakeSession, expected, ticket
from .runs import finished, prefill, tokens


async def admit(
    bench: Bench, session: FakeSession, number: int, *, suspect: bool = False
) -> Ticket:
    """A request with a slot, and a ticket that the decode worker has claimed."""
    asked = ticket(f"r{number}", range(100 * number, 100 * number + 10), max_tokens=4)
    issued = await prefill(bench, asked)
    bench.decode.reserve(session, *issued.key, 1)
    bench.decode.admit(session, issued, suspect=suspect)
    job = bench.decode._jobs.get(session, *issued.key)
    assert job is not None
    await bench.until(lambda: job.state is not State.CLAIMING)
    return issued


@dataclass
class HeldUp:
    reached: asyncio.Event
    over: asyncio.Event


def hold_up(bench: Bench, monkeypatch: pytest.MonkeyPatch, operation: str) -> HeldUp:
    """The store does it, and its answer waits until the delay is `over`."""
    held, act = HeldUp(asyncio.Event(), asyncio.Event()), getattr(bench.store, operation)

    async def slowly(*args: Any) -> Any:
        answer = await act(*args)
        held.reached.set()
        await held.over.wait()
        return answer

    monkeypatch.setattr(bench.store, operation, slowly)
    return held


async def test_no_sequence_is_computed_before_its_gateway_knows(bench: Bench) -> None:
    """So that whatever a step does to its worker, it is known over whom."""
    session = FakeSession()
    session.reads = False
    bench.prefill.submit(session, ticket("r1", PROMPT))
    await bench.until(lambda: session.began == ["r1"])
    other = FakeSession()
    bench.prefill.submit(other, ticket("r2", (1, 2, 3)))
    await bench.until(lambda: bool(other.of(Prefilled)))  # a step has run meanwhile
    assert bench.arena.num_computed == 3
    assert not session.events
    session.read()
    await bench.until(lambda: bool(session.of(Prefilled)))
    assert bench.arena.num_computed == 13


async def test_no_sequence_is_decoded_before_its_gateway_knows(bench: Bench) -> None:
    session = FakeSession()
    session.reads = False
    issued = await admit(bench, session, 1)
    await bench.until(lambda: session.began == ["r1"])
    other = FakeSession()
    await admit(bench, other, 2)
    await bench.until(lambda: finished(other, "r2"))
    assert tokens(session, issued) == [*issued.sequences[0].token_ids]
    session.reads = True
    session.read()
    await bench.until(lambda: finished(session, "r1"))
    assert tokens(session, issued) == expected(issued.prompt_token_ids, 4)
    await bench.until_empty()


async def test_a_sequence_waiting_for_a_lost_store_has_not_begun(bench: Bench) -> None:
    """Nor who finds no blocks."""
    session = FakeSession()
    hog = await bench.store.allocate("pool", "hog", bench.prefill.worker_id, 1, (), 30)
    bench.prefill.submit(session, ticket("r2", PROMPT))
    await bench.until(lambda: bool(bench.store.ledger("pool").stats().num_waiters))
    assert not session.began
    await bench.store.release("pool", "hog", hog.epoch)
    await bench.until(lambda: session.began == ["r2"])


async def test_suspects_are_begun_one_at_a_time_whoever_sends_them(bench: Bench) -> None:
    """The second when the first has a token, the third when the second is cancelled; who is no
    suspect is not held up."""
    bench.decode_model.gate.clear()
    sessions = [FakeSession() for _ in range(4)]
    issued = [
        await admit(bench, session, number, suspect=number < 4)
        for number, session in enumerate(sessions, 1)
    ]
    first, second, third, free = sessions
    await bench.until(lambda: (first.began, free.began) == (["r1"], ["r4"]))
    assert not second.began
    assert not third.began
    bench.decode_model.pause_after = bench.decode_model.num_steps + 1
    bench.decode_model.gate.set()
    await bench.until(lambda: second.began == ["r2"])
    assert not third.began
    bench.decode.abort(second, *issued[1].key)
    bench.decode_model.gate.set()
    await bench.until(lambda: finished(third, "r3"))
    await bench.until(lambda: finished(first, "r1") and finished(free, "r4"))
    for number in (0, 2, 3):
        assert tokens(sessions[number], issued[number]) == expected(
            issued[number].prompt_token_ids, 4
        )
    await bench.until_empty()


async def test_suspected_prompts_too(bench: Bench) -> None:
    bench.prefill_model.gate.clear()
    session = FakeSession()
    for number in (1, 2, 3):
        asked = ticket(f"r{number}", range(100 * number, 100 * number + 10))
        bench.prefill.submit(session, asked, suspect=True)
    await bench.until(lambda: bench.prefill_model.num_begun == 1)
    assert session.began == ["r1"]
    bench.prefill_model.gate.set()
    await bench.until(lambda: len(session.of(Prefilled)) == 3)
    assert session.began == ["r1", "r2", "r3"]


@pytest.mark.parametrize("how", ["aborted", "gateway gone", "handed over"])
async def test_a_suspect_that_leaves_the_line_leaves_nothing(bench: Bench, how: str) -> None:
    """Nor does it hold up who stands behind it."""
    bench.decode_model.gate.clear()
    sessions = [FakeSession() for _ in range(3)]
    issued = [
        await admit(bench, session, number, suspect=True)
        for number, session in enumerate(sessions, 1)
    ]
    first, second, third = sessions
    await bench.until(lambda: first.began == ["r1"])
    match how:
        case "aborted":
            bench.decode.abort(second, *issued[1].key)
        case "gateway gone":
            bench.decode.close(second)
        case "handed over":
            bench.decode.hand_over(second, *issued[1].key)
    bench.decode_model.gate.set()
    await bench.until(lambda: finished(third, "r3"))
    assert not second.began
    if how == "handed over":
        (requeued,) = second.events[1:]
        at_rest: Ticket = replace(requeued.ticket, attempt=2)  # type: ignore[union-attr]
        bench.decode.reserve(second, *at_rest.key, 1)
        bench.decode.admit(second, at_rest)
        await bench.until(lambda: finished(second, "r2"))
    await bench.until_empty()


@pytest.mark.parametrize("max_tokens", [1, 4], ids=["ends", "goes on"])
async def test_a_later_sequence_begins_when_the_gateway_has_the_token(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """However long the store takes: it may kill at once, and its predecessor would seem to have."""
    session = FakeSession()
    held = hold_up(bench, monkeypatch, "release" if max_tokens == 1 else "detach")
    for number in (1, 2):
        asked = ticket(f"r{number}", range(100 * number, 100 * number + 10), max_tokens=max_tokens)
        bench.prefill.submit(session, asked, suspect=True)
    await held.reached.wait()
    assert session.told == ["Began r1"]
    held.over.set()
    await bench.until(lambda: len(session.of(Prefilled)) == 2)
    assert session.told == ["Began r1", "Prefilled r1", "Began r2", "Prefilled r2"]


async def test_or_knows_that_it_gave_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    held = hold_up(bench, monkeypatch, "release")
    bench.prefill_model.pause_after = 1
    bench.prefill.submit(session, ticket("r1", range(100, 140)), suspect=True)
    bench.prefill.submit(session, ticket("r2", PROMPT), suspect=True)
    await bench.until(lambda: bench.prefill_model.num_begun == 2)
    bench.prefill._on_demands(["h-r1"])
    bench.prefill_model.gate.set()
    await held.reached.wait()
    assert session.told == ["Began r1"]
    held.over.set()
    await bench.until(lambda: bool(session.of(Prefilled)))
    assert session.told == ["Began r1", "Requeued r1", "Began r2", "Prefilled r2"]


async def test_of_what_is_decoded_it_has_the_token_too(bench: Bench) -> None:
    bench.decode_model.gate.clear()
    session = FakeSession()
    for number in (1, 2):
        await admit(bench, session, number, suspect=True)
    bench.decode_model.gate.set()
    await bench.until(lambda: finished(session, "r1") and finished(session, "r2"))
    assert session.told.index("Step r1") < session.told.index("Began r2")


@pytest.mark.parametrize("how", ["preempted", "swapped", "handed over"])
async def test_or_its_ticket(make_bench: MakeBench, how: str) -> None:
    bench = await make_bench(num_swap_blocks=16 if how == "swapped" else 0)
    session = FakeSession()
    session.reads = False
    issued = await admit(bench, session, 1, suspect=True)
    await admit(bench, session, 2, suspect=True)
    if how == "handed over":
        bench.decode.hand_over(session, *issued.key)
    else:
        bench.decode._on_demands([issued.holder_id])
    await bench.until(lambda: "r2" in session.began)
    of_one = [told for told in session.told if told.endswith("r1")]
    assert session.told.index("Requeued r1") < session.told.index("Began r2")
    assert of_one == ["Reserved r1", "Began r1", "Requeued r1"]
    requeued = session.of(Requeued)[0].ticket
    assert bool(requeued.swapped) == (how == "swapped")
    assert bool(requeued.sequences[0].block_ids) == (how == "handed over")
