"""A worker that prefills and decodes in one engine: which role gets a command and an outcome, and
what one step carries."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from services.engine.batch import Row
from services.protocol.messages import (
    Abort,
    Admit,
    Command,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserve,
    Submit,
)
from services.protocol.ticket import Ticket
from services.runtime.errors import InvalidRequest
from services.runtime.metrics import WorkerMetrics
from services.worker.limits import Limits
from services.worker.pool_worker import PoolWorker
from services.worker.roles import ROLES
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill
from tests.late_device import CompleteFlight, Device
from tests.waiting import until

from .conftest import running
from .fake_pools import FakePools
from .fakes import PROMPT, FakeForward, FakeSession, expected, ticket
from .runs import count, finished, outputs, prefilled, tokens

BUDGET = 8


class Recorded(FakeForward):
    """Records the number of tokens of each row of each step."""

    def __init__(self, arena: Any) -> None:
        super().__init__(arena)
        self.steps: list[list[int]] = []

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> CompleteFlight:
        if rows:
            self.steps.append([len(row.token_ids) for row in rows])
        return super().launch(rows, copies)


class MixedWorker:
    """A worker with the sessions of one gateway: one for each of its streams."""

    def __init__(self, store: MemoryStore, worker: PoolWorker[Decode], model: Recorded) -> None:
        self.store, self.worker, self.model = store, worker, model
        self.prefill, self.decode = FakeSession(), FakeSession()

    def execute(self, session: FakeSession, command: Command) -> None:
        """Send a command on the stream of this session."""
        prefill, decode = self.worker.roles
        role = decode if session is self.decode else prefill
        role.execute(session, command)

    async def prefilled(self, asked: Ticket) -> Ticket:
        self.execute(self.prefill, Submit(asked))
        await until(lambda: asked.request_id in prefilled(self.prefill))
        return cast(Ticket, prefilled(self.prefill)[asked.request_id].ticket)

    async def start(self, asked: Ticket) -> Ticket:
        issued = await self.prefilled(asked)
        self.execute(self.decode, Reserve(*issued.key, 1))
        self.execute(self.decode, Admit(issued))
        return issued

    async def until_empty(self) -> None:
        await until(lambda: self.store.stats("pool"), lambda stats: not stats.num_held)
        assert (await self.store.audit("pool")).violations == ()


@pytest.fixture
async def mixed(tmp_path: Path, device: Device) -> AsyncIterator[MixedWorker]:
    store = MemoryStore()
    pools = await FakePools.make(store, tmp_path, 200, 4)
    # A sequence that decodes waits for no block, which would make steps without it.
    limits = Limits(8, BUDGET, max_model_len=1000, look_ahead=40)
    model = Recorded(pools.arena)
    metrics = WorkerMetrics(CollectorRegistry())
    parts = await pools.join("decode-1-0000000a", device(model), limits, metrics)
    worker = PoolWorker(parts, Decode, [Prefill])
    async with running(worker):
        yield MixedWorker(store, worker, model)
        model.gate.set()


async def test_a_request_takes_both_roles_of_one_engine(mixed: MixedWorker) -> None:
    """Each session gets the events of its role, and none of the other's."""
    issued = await mixed.start(ticket("r1", PROMPT, max_tokens=30))
    await until(lambda: finished(mixed.decode, "r1"))
    assert tokens(mixed.decode, issued) == expected(PROMPT, 30)
    assert [type(event) for event in mixed.prefill.events] == [Prefilled]
    assert not mixed.decode.of(Prefilled)
    await mixed.until_empty()


async def test_a_step_decodes_beside_chunks_of_a_prompt(mixed: MixedWorker) -> None:
    """30 tokens of one request are as many steps as without the prompt of another, whose chunks
    fill each of these steps up to the most tokens of a step."""
    mixed.model.pause_after = 10
    issued = await mixed.start(ticket("r1", PROMPT, max_tokens=30))
    await until(lambda: not mixed.model.gate.is_set())
    mixed.execute(mixed.prefill, Submit(ticket("r2", range(200, 240), max_tokens=1)))
    await until(lambda: "r2" in mixed.prefill.began)
    mixed.model.gate.set()
    await until(lambda: finished(mixed.decode, "r1"))
    assert tokens(mixed.decode, issued) == expected(PROMPT, 30)
    own, others = mixed.model.steps[:2], mixed.model.steps[2:]
    assert own == [[8], [2]]
    chunks = [sorted(step) for step in others if step != [1]]
    assert chunks == [[1, BUDGET - 1]] * 5 + [[1, 5]]
    assert len(others) == 29
    await mixed.until_empty()


async def test_an_abort_ends_the_request_of_its_session(mixed: MixedWorker) -> None:
    """The streams of a gateway have requests of their own."""
    issued = await mixed.start(ticket("r1", PROMPT, max_tokens=500))
    await until(lambda: bool(outputs(mixed.decode, "r1")))
    mixed.worker.role.execute(FakeSession(), Abort(*issued.key))
    assert mixed.worker.role.running["h-r1"].ending is None
    mixed.execute(mixed.prefill, Abort(*issued.key))  # of the ticket that was claimed
    assert mixed.worker.role.running["h-r1"].ending is None
    mixed.execute(mixed.decode, Abort(*issued.key))
    await mixed.until_empty()
    assert mixed.worker.num_busy == 0


async def test_the_load_is_the_load_of_both_roles(mixed: MixedWorker) -> None:
    await mixed.start(ticket("r1", PROMPT, max_tokens=500))
    await until(lambda: bool(outputs(mixed.decode, "r1")))
    mixed.model.gate.clear()
    mixed.execute(mixed.decode, Reserve("r2", 1, 3))
    mixed.execute(mixed.prefill, Submit(ticket("r2", range(200, 240))))
    await until(lambda: "r2" in mixed.prefill.began)
    load = mixed.worker.load()
    assert (load.num_running, load.num_free_slots, load.num_pending_tokens) == (2, 8 - 1 - 3, 40)
    assert mixed.worker.num_busy == 3  # with the reservation


async def test_each_role_preempts_its_holders(mixed: MixedWorker) -> None:
    await mixed.start(ticket("r1", PROMPT, max_tokens=500))
    await until(lambda: bool(outputs(mixed.decode, "r1")))
    mixed.model.gate.clear()
    mixed.execute(mixed.prefill, Submit(ticket("r2", range(200, 240))))
    await until(lambda: "r2" in mixed.prefill.began)
    mixed.worker.preempt(["h-r1", "h-r2"])
    mixed.model.gate.set()
    for session, request_id in ((mixed.decode, "r1"), (mixed.prefill, "r2")):
        await until(partial(session.of, Requeued))
        (event,) = session.of(Requeued)
        assert (event.request_id, event.reason) == (request_id, RequeueReason.PREEMPTED)
    assert count(mixed.worker.metrics.num_preemptions) == 2
    await mixed.until_empty()


async def test_a_closed_stream_ends_the_requests_of_its_role(mixed: MixedWorker) -> None:
    await mixed.start(ticket("r1", PROMPT, max_tokens=30))
    await until(lambda: bool(outputs(mixed.decode, "r1")))
    mixed.worker.roles[0].close(mixed.prefill)
    await until(lambda: finished(mixed.decode, "r1"))
    await mixed.until_empty()


async def test_it_takes_neither_role_alone(mixed: MixedWorker) -> None:
    for role in ROLES:
        with pytest.raises(InvalidRequest, match=f"decode-1 is a {role} worker already"):
            mixed.worker.drain(role)
    assert not mixed.worker.draining


async def test_a_drain_ends_with_the_requests_of_both_roles(mixed: MixedWorker) -> None:
    await mixed.start(ticket("r1", PROMPT, max_tokens=200))
    await until(lambda: bool(outputs(mixed.decode, "r1")))
    mixed.model.gate.clear()
    mixed.execute(mixed.prefill, Submit(ticket("r2", range(200, 240), max_tokens=1)))
    await until(lambda: "r2" in mixed.prefill.began)
    assert mixed.worker.drain() == 2
    mixed.execute(mixed.prefill, Submit(ticket("r3", PROMPT)))
    assert [event.reason for event in mixed.prefill.of(Requeued)] == [RequeueReason.DRAINING]
    mixed.model.gate.set()
    await mixed.worker.drained()
    assert finished(mixed.decode, "r1")
