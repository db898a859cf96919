"""Tickets at rest at a decode worker: handed over, claimed, taken back."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.common.runtime.metrics import WorkerMetrics
from services.decode.worker import DecodeWorker
from services.protocol.ticket import Ticket
from services.worker.events import Requeued, RequeueReason

from .conftest import Bench, MakeBench, running
from .fakes import PROMPT, FakeForward, FakeSession, expected, join, ticket
from .runs import finished, outputs, start, tokens


async def handed_over(bench: Bench, request_id: str, attempt: int = 1) -> Ticket:
    """The ticket at rest of what runs at the decode worker."""
    bench.decode.hand_over(bench.session, request_id, attempt)
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    requeued = bench.session.of(Requeued)[0]
    assert requeued.reason is RequeueReason.HANDED_OVER
    assert requeued.ticket.key == (request_id, attempt)
    ticket: Ticket = requeued.ticket
    return ticket


async def test_a_handed_over_sequence_goes_on_where_it_was(bench: Bench) -> None:
    """At another worker, from block ids alone: each position is computed once, by whoever ran it,
    and the holder stays."""
    other = await another_decode_worker(bench)
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=60))
    await bench.until(lambda: len(outputs(bench.session, "r1")) > 8)
    at_rest = await handed_over(bench, "r1")
    assert at_rest.holder_id == issued.holder_id
    assert at_rest.holder_epoch == 4  # allocated 1, issued 2, claimed 3, at rest 4
    assert bench.decode.load().num_free_slots == 16
    got = tokens(bench.session, issued)
    assert at_rest.sequences[0].token_ids == tuple(got)
    assert at_rest.sequences[0].num_computed_tokens == len(PROMPT) + len(got) - 1

    session = FakeSession()
    async with running(other):
        other.reserve(session, "r1", 2, 1)
        other.admit(session, replace(at_rest, attempt=2))
        await bench.until(lambda: finished(session, "r1"))
        rest = [output.token_id for output in outputs(session, "r1")]
        assert [*got, *rest] == expected(PROMPT, 60)
        assert bench.arena.num_computed == len(PROMPT) + 60 - 1
        await bench.until_empty()


async def test_a_detached_request_waits_for_no_step_of_others(bench: Bench) -> None:
    """The step in flight is its own, too; the next one is not."""
    for request_id in ("r1", "r2"):
        await start(bench, ticket(request_id, PROMPT, max_tokens=500))
    await bench.until(lambda: all(outputs(bench.session, name) for name in ("r1", "r2")))
    model = bench.decode_model
    model.gate.clear()
    await bench.until(lambda: model.num_begun > model.num_steps)
    bench.decode.hand_over(bench.session, "r1", 1)
    model.pause_after = model.num_steps + 1
    model.gate.set()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    assert model.num_steps == model.pause_after
    model.pause_after = 0
    model.gate.set()
    for request_id in ("r1", "r2"):
        bench.decode.abort(bench.session, request_id, 1)
    await bench.until_empty()


async def test_detaching_takes_one_exchange_with_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One exchange never carries two calls about one holder: with a second one for each, those who
    come to rest together would do so one after the other."""
    names = ["r1", "r2", "r3"]
    holders = {
        (await start(bench, ticket(name, PROMPT, max_tokens=500))).holder_id for name in names
    }
    await bench.until(lambda: all(outputs(bench.session, name) for name in names))
    detached: list[str] = []
    detach = bench.store.detach

    async def counted(pool_id: str, holder_id: str, epoch: int) -> int:
        detached.append(holder_id)
        return await detach(pool_id, holder_id, epoch)

    monkeypatch.setattr(bench.store, "detach", counted)
    for name in names:
        bench.decode.hand_over(bench.session, name, 1)
    await bench.until(lambda: len(bench.session.of(Requeued)) == 3)
    assert sorted(detached) == sorted(holders)
    for name in names:
        bench.decode.abort(bench.session, name, 1)
    await bench.until_empty()


async def test_a_ticket_is_offered_once_it_is_at_rest_in_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: whoever claims it would be refused, and all computed again."""
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    detach, may_detach, asked = bench.store.detach, asyncio.Event(), asyncio.Event()

    async def late(*args: Any) -> int:
        asked.set()
        await may_detach.wait()
        return await detach(*args)

    monkeypatch.setattr(bench.store, "detach", late)
    bench.decode.hand_over(bench.session, "r1", 1)
    async with asyncio.timeout(10):
        await asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not bench.session.of(Requeued)
    may_detach.set()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()


async def test_a_handed_over_sequence_may_come_back(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=60))
    await bench.until(lambda: len(outputs(bench.session, "r1")) > 8)
    at_rest = await handed_over(bench, "r1")
    bench.decode.reserve(bench.session, "r1", 2, 1)
    bench.decode.admit(bench.session, replace(at_rest, attempt=2))
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 60)
    assert not bench.decode._detached._on_pool
    await bench.until_empty()


async def test_a_sequence_that_waits_for_its_next_block_is_handed_over_without_it(
    make_bench: MakeBench,
) -> None:
    """It had 12 slots for 13 tokens; whoever claims it gets the fourth block."""
    bench = await make_bench(num_blocks=4)
    await bench.store.allocate("pool", "in the way", "PrefillWorker", 9, [], 1)
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=6))
    await bench.until(lambda: len(tokens(bench.session, issued)) == 3)
    await bench.until(lambda: bool(bench.decode._extender._wanting))
    at_rest = await handed_over(bench, "r1")
    assert len(at_rest.sequences[0].block_ids) == 3
    await bench.store.release("pool", "in the way", 1)
    bench.decode.reserve(bench.session, "r1", 2, 1)
    bench.decode.admit(bench.session, replace(at_rest, attempt=2))
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 6)


async def test_an_abort_ends_a_ticket_at_rest(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    await handed_over(bench, "r1")
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert len(bench.session.of(Requeued)) == 1


async def test_an_abort_on_the_way_to_rest_frees_the_blocks(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    bench.decode.hand_over(bench.session, "r1", 1)
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert not bench.session.of(Requeued)


async def test_a_ticket_at_rest_that_nobody_claims_is_taken_back(bench: Bench) -> None:
    bench.decode.limits = replace(bench.decode.limits, ticket_ttl_s=0.02)
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    await handed_over(bench, "r1")
    await bench.until_empty()
    await bench.until(lambda: len(bench.session.of(Requeued)) == 2)
    taken_back = bench.session.of(Requeued)[1]
    assert taken_back.reason is RequeueReason.STALE_TICKET
    assert not taken_back.ticket.sequences[0].block_ids


async def test_a_demand_ends_a_ticket_at_rest(bench: Bench) -> None:
    """The last in order gives way, whether it runs or rests."""
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    await handed_over(bench, "r1")
    bench.decode._on_demands([issued.holder_id])
    await bench.until_empty()
    await bench.until(lambda: len(bench.session.of(Requeued)) == 2)
    assert bench.session.of(Requeued)[1].reason is RequeueReason.PREEMPTED


async def test_a_drained_worker_stays_until_its_tickets_are_claimed(bench: Bench) -> None:
    other = await another_decode_worker(bench)
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    bench.decode.drain()
    at_rest = await handed_over(bench, "r1")
    drained = asyncio.create_task(bench.decode.drained())
    await asyncio.wait([drained], timeout=0.2)
    assert not drained.done()
    session = FakeSession()
    async with running(other):
        other.reserve(session, "r1", 2, 1)
        other.admit(session, replace(at_rest, attempt=2))
        await asyncio.wait_for(drained, timeout=10)
        other.abort(session, "r1", 2)
        await bench.until_empty()


async def test_requests_left_after_the_grace_period_are_returned(
    bench: Bench,
) -> None:
    """What runs, and what is at rest and not claimed."""
    running = await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await start(bench, ticket("r2", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1") and outputs(bench.session, "r2")))
    bench.decode.drain()
    await handed_over(bench, "r2")
    bench.decode.give_back()
    async with asyncio.timeout(10):
        await bench.decode.drained()
    await bench.until_empty()
    back = {r.ticket.request_id: r for r in bench.session.of(Requeued)[1:]}
    assert set(back) == {"r1", "r2"}
    assert all(r.reason is RequeueReason.DRAINING for r in back.values())
    assert not any(r.ticket.sequences[0].block_ids for r in back.values())
    assert list(back["r1"].ticket.sequences[0].token_ids) == tokens(bench.session, running)


async def another_decode_worker(bench: Bench) -> DecodeWorker:
    membership = await join(bench.store, bench.spec, "another", bench.arena.stamps)
    metrics = WorkerMetrics(CollectorRegistry())
    model = FakeForward(bench.arena)
    return DecodeWorker(bench.store, membership, model, bench.decode.limits, metrics)
