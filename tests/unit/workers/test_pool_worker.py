"""A worker that cannot go on ends, so that no request waits for it."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from blockstore.hashing import prefix_hashes
from blockstore.memory_store import MemoryStore
from services.protocol.messages import Step, WorkerEvent
from services.protocol.ticket import TicketSequence
from services.runtime.errors import InvalidRequest
from services.runtime.metrics import WorkerMetrics
from services.worker.limits import Limits
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill

from .conftest import WorkerPair
from .fakes import Arena, FakeForward, FakeSession, join, make_pool, make_stamps, ticket


class UnresponsiveSession(FakeSession):
    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        if isinstance(event, Step):
            raise ValueError("cannot be sent")
        super().send(event, then)


async def test_an_error_after_a_step_ends_the_worker(tmp_path: Path) -> None:
    """The outcomes of the rest of the step are lost: the worker must not seem to go on."""
    store = MemoryStore()
    spec = await make_pool(store, num_blocks=8, block_size=4)
    stamps = make_stamps(tmp_path / "stamps", spec)
    membership = await join(store, spec, "w", stamps)
    arena = Arena(4, stamps, slots={position: (position, position) for position in range(10)})
    model, limits = FakeForward(arena), Limits(4, 16, max_model_len=100)
    metrics = WorkerMetrics(CollectorRegistry())
    worker = PoolWorker(WorkerParts(store, membership, model, limits, metrics), Decode)
    blocks = (await store.allocate("pool", "h-r1", "w", 1, (), 3)).block_ids
    stamps.mark_owned(blocks, "h-r1")
    parents = [bytes(16), *prefix_hashes(bytes(16), range(10), 4)]
    for number, (parent, own) in enumerate(pairwise(parents)):
        stamps.complete(blocks[number], own, parent, range(4 * number, 4 * number + 4))
    await store.detach("pool", "h-r1", 1)
    detached = TicketSequence(0, token_ids=(7,), block_ids=blocks, num_computed_tokens=10)

    working = asyncio.create_task(worker.run())
    session = UnresponsiveSession()
    worker.role.reserve(session, "r1", 1, 1)
    worker.role.admit(session, ticket("r1", range(10), holder_epoch=2, sequences=(detached,)))
    with pytest.raises(ValueError, match="cannot be sent"):
        await asyncio.wait_for(working, 10)


async def test_a_worker_without_the_draft_model_of_decode_stays_a_prefill_worker(
    pair: WorkerPair,
) -> None:
    """It would decode without drafts, while its deployment counts on them."""
    member = await join(pair.store, pair.spec, "prefill-2-0000000a", pair.arena.stamps)
    metrics, forward = WorkerMetrics(CollectorRegistry()), FakeForward(pair.arena)
    parts = pair.store, member, forward, pair.prefill.limits, metrics
    worker = PoolWorker(WorkerParts(*parts, lacks_draft=True), Prefill)
    with pytest.raises(InvalidRequest, match=r"prefill-2 was started .* without the draft model"):
        worker.drain("decode")
    assert not worker.draining
