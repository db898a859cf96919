"""A worker that was given up while it was stopped neither writes nor answers."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from blockstore.errors import WorkerFenced
from blockstore.memory_store import MemoryStore
from services.pool.locks import WorkerLock, revoke_lock
from services.protocol.ticket import TicketSequence
from services.runtime.metrics import WorkerMetrics
from services.worker.limits import Limits
from services.worker.liveness.fence_guard import FenceGuard

from .fake_pools import FakePools
from .fakes import PROMPT, FakeForward, ticket


async def test_a_worker_copies_nothing_once_a_lock_of_its_pools_is_marked(tmp_path: Path) -> None:
    locks = [WorkerLock.create(tmp_path / f"{name}.lock") for name in ("own", "colder")]
    guard = FenceGuard(locks)
    pools = await FakePools.make(MemoryStore(), tmp_path, 16, 4, num_swap_blocks=16)
    pools.arena.slots.update((position, (position, token)) for position, token in enumerate(PROMPT))
    metrics, limits = WorkerMetrics(CollectorRegistry()), Limits(4, 16, max_model_len=100)
    parts = await pools.join("w", FakeForward(pools.arena), limits, metrics, check=guard.check)
    assert parts.swap_pool is not None
    assert pools.swap_arena is not None
    asked = ticket("r1", PROMPT, sequences=(TicketSequence(0, (1,), (0, 1, 2), 10),))
    assert await parts.swap_pool.put(asked)
    revoke_lock(locks[1].path)
    with pytest.raises(WorkerFenced):
        await parts.swap_pool.put(replace(asked, holder_id="h-r2", prompt_token_ids=PROMPT[1:]))
    assert pools.swap_arena.num_copied == 3
    parts.swap_pool.close()


def test_a_worker_that_is_gone_cannot_be_given_up(tmp_path: Path) -> None:
    revoke_lock(tmp_path / "nobody.lock")
    assert list(tmp_path.iterdir()) == []
