"""Workers that join a small pool, in a directory of the test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from blockstore.memory_store import MemoryStore
from services.pool.layout import PoolLayout
from services.pool.sizing import MemoryPlan
from services.pool.stamps import record_bytes
from services.worker.membership import Membership, join
from services.worker.pool_memory import PoolMemory

LAYOUT = PoolLayout(
    model="tiny",
    fingerprint="f00d",
    num_layers=2,
    num_kv_heads=3,
    head_dim=5,
    dtype="float32",
    block_size=4,
)
NUM_BLOCKS = 11
PLAN = MemoryPlan(pool_bytes=NUM_BLOCKS * (LAYOUT.block_bytes + record_bytes(4)))
RUN_ID = "run-1"

Join = Callable[..., Awaitable[Membership]]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def joined(store: MemoryStore, tmp_path: Path) -> AsyncIterator[Join]:
    """A function that joins as a worker; keyword arguments change the defaults. The locks end with
    the test."""
    members: list[Membership] = []

    async def joined(
        worker_id: str,
        layout: PoolLayout = LAYOUT,
        run_id: str = RUN_ID,
        plan: MemoryPlan = PLAN,
        store: MemoryStore = store,
        memory: PoolMemory | None = None,
    ) -> Membership:
        members.append(
            await join(store, run_id, tmp_path, layout, worker_id, plan, 0.2, memory=memory)
        )
        return members[-1]

    yield joined
    for member in members:
        member.pool.close()
        member.stamps.close()
        member.lock.close()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def die(member: Membership) -> None:
    """Drop the lock, as the kernel does for a killed process."""
    member.lock.close()
