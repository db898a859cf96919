"""Detached tickets of a decode worker: handed over, claimed, released."""

import asyncio
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from services.protocol.messages import Requeued, RequeueReason
from services.protocol.ticket import Ticket
from services.runtime.metrics import WorkerMetrics
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles.decode import Decode

from .conftest import MakePair, WorkerPair, running
from .fakes import PROMPT, FakeForward, FakeSession, expected, join, ticket
from .runs import finished, outputs, start, tokens


async def handed_over(pair: WorkerPair, request_id: str, attempt: int = 1) -> Ticket:
    """Hand over the running request `request_id`; returns its detached ticket."""
    pair.decode.role.hand_over(pair.session, request_id, attempt)
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    requeued = pair.session.of(Requeued)[0]
    assert requeued.reason is RequeueReason.HANDED_OVER
    assert (requeued.request_id, requeued.attempt) == (request_id, attempt)
    ticket: Ticket = requeued.ticket
    return ticket


async def test_a_detached_request_waits_for_no_step_of_others(pair: WorkerPair) -> None:
    """The steps in flight contain it; the next one does not."""
    for request_id in ("r1", "r2"):
        await start(pair, ticket(request_id, PROMPT, max_tokens=500))
    await pair.until(lambda: all(outputs(pair.session, name) for name in ("r1", "r2")))
    model = pair.decode_model
    model.gate.clear()
    await pair.until(lambda: model.num_begun > model.num_steps)
    pair.decode.role.hand_over(pair.session, "r1", 1)
    model.pause_after = model.num_steps + 1 + pair.is_late
    model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    assert model.num_steps == model.pause_after
    model.pause_after = 0
    model.gate.set()
    for request_id in ("r1", "r2"):
        pair.decode.role.abort(pair.session, request_id, 1)
    await pair.until_empty()


class LateStore(MemoryStore):
    """A store whose second `detach`, which is the decode worker's, waits for `may_detach`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.may_detach = asyncio.Event()

    async def detach(self, pool_id: str, holder_id: str, epoch: int) -> int:
        self.num_asked += 1
        if self.num_asked == 2:
            await self.may_detach.wait()
        return await super().detach(pool_id, holder_id, epoch)


async def test_a_ticket_is_offered_once_the_store_has_detached_it(make_pair: MakePair) -> None:
    """Otherwise a claim of it would be refused, and all of it computed again."""
    store = LateStore()
    pair = await make_pair(store=store)
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    pair.decode.role.hand_over(pair.session, "r1", 1)
    await pair.until(lambda: store.num_asked == 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not pair.session.of(Requeued)
    store.may_detach.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    pair.decode.role.abort(pair.session, "r1", 1)
    await pair.until_empty()


async def test_abort_during_a_detach_frees_the_blocks(pair: WorkerPair) -> None:
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    pair.decode.role.hand_over(pair.session, "r1", 1)
    pair.decode.role.abort(pair.session, "r1", 1)
    await pair.until_empty()
    assert not pair.session.of(Requeued)


async def test_an_unclaimed_detached_ticket_is_released(pair: WorkerPair) -> None:
    pair.decode.limits = replace(pair.decode.limits, ticket_ttl_s=0.02)
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    await handed_over(pair, "r1")
    await pair.until_empty()
    await pair.until(lambda: len(pair.session.of(Requeued)) == 2)
    taken_back = pair.session.of(Requeued)[1]
    assert taken_back.reason is RequeueReason.STALE_TICKET
    assert not taken_back.ticket.sequences[0].block_ids


async def test_a_demand_releases_a_detached_ticket(pair: WorkerPair) -> None:
    """The last request in order is preempted, whether it runs or is at rest."""
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    await handed_over(pair, "r1")
    pair.decode.role.preempt([issued.holder_id])
    await pair.until_empty()
    await pair.until(lambda: len(pair.session.of(Requeued)) == 2)
    assert pair.session.of(Requeued)[1].reason is RequeueReason.PREEMPTED


async def test_a_drained_worker_stays_until_its_tickets_are_claimed(pair: WorkerPair) -> None:
    other = await another_decode_worker(pair)
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    pair.decode.drain()
    detached = await handed_over(pair, "r1")
    drained = asyncio.create_task(pair.decode.drained())
    await asyncio.wait([drained], timeout=0.2)
    assert not drained.done()
    session = FakeSession()
    async with running(other):
        other.role.reserve(session, "r1", 2, 1)
        other.role.admit(session, replace(detached, attempt=2))
        await asyncio.wait_for(drained, timeout=10)
        other.role.abort(session, "r1", 2)
        await pair.until_empty()


async def test_requests_left_after_the_grace_period_are_returned(pair: WorkerPair) -> None:
    """Running requests, and unclaimed ones at rest."""
    running = await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await start(pair, ticket("r2", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1") and outputs(pair.session, "r2")))
    pair.decode.drain()
    await handed_over(pair, "r2")
    pair.decode.role.requeue_all()
    async with asyncio.timeout(10):
        await pair.decode.drained()
    await pair.until_empty()
    back = {r.request_id: r for r in pair.session.of(Requeued)[1:]}
    assert set(back) == {"r1", "r2"}
    assert all(r.reason is RequeueReason.DRAINING for r in back.values())
    assert not any(r.ticket.sequences[0].block_ids for r in back.values())
    assert list(back["r1"].ticket.sequences[0].token_ids) == tokens(pair.session, running)


async def another_decode_worker(pair: WorkerPair) -> PoolWorker[Decode]:
    membership = await join(pair.store, pair.spec, "another", pair.arena.stamps)
    metrics = WorkerMetrics(CollectorRegistry())
    model = FakeForward(pair.arena)
    parts = WorkerParts(pair.store, membership, model, pair.decode.limits, metrics)
    return PoolWorker(parts, Decode)


class ShortStore(MemoryStore):
    """Counts the extensions that it has refused."""

    num_refused = 0

    async def extend(self, *args: Any) -> Any:
        extension = await super().extend(*args)
        self.num_refused += any(grown.error for grown in extension.grown)
        return extension


async def test_a_sequence_that_waits_for_its_next_block_is_handed_over_without_it(
    make_pair: MakePair,
) -> None:
    """It had 12 slots for 13 tokens; the worker that claims it gets the fourth block."""
    store = ShortStore()
    pair = await make_pair(num_blocks=4, store=store)
    await pair.store.allocate("pool", "in the way", "Prefill", 9, [], 1)
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=6))
    await pair.until(lambda: len(tokens(pair.session, issued)) == 3)
    await pair.until(lambda: store.num_refused > 0)
    detached = await handed_over(pair, "r1")
    assert len(detached.sequences[0].block_ids) == 3
    await pair.store.release("pool", "in the way", 1)
    pair.decode.role.reserve(pair.session, "r1", 2, 1)
    pair.decode.role.admit(pair.session, replace(detached, attempt=2))
    await pair.until(lambda: finished(pair.session, "r1"))
    assert tokens(pair.session, issued) == expected(PROMPT, 6)


async def test_abort_ends_a_detached_ticket(pair: WorkerPair) -> None:
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    await handed_over(pair, "r1")
    pair.decode.role.abort(pair.session, "r1", 1)
    await pair.until_empty()
    assert len(pair.session.of(Requeued)) == 1


async def test_a_handed_over_sequence_may_come_back(pair: WorkerPair) -> None:
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=60))
    await pair.until(lambda: len(outputs(pair.session, "r1")) > 8)
    detached = await handed_over(pair, "r1")
    pair.decode.role.reserve(pair.session, "r1", 2, 1)
    pair.decode.role.admit(pair.session, replace(detached, attempt=2))
    await pair.until(lambda: finished(pair.session, "r1"))
    assert tokens(pair.session, issued) == expected(PROMPT, 60)
    assert not pair.decode.role.jobs.detached("h-r1")
    await pair.until_empty()
