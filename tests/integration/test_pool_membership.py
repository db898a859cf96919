"""Joining and leaving pools: made by the first, taken away by the last, shared in between."""

import asyncio
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockstore.errors import StoreLost, StoreUnavailable, WorkerNotEmpty
from blockstore.memory_store import MemoryStore
from blockstore.store import PoolSpec, Recovery
from services.common.errors import StartupError
from services.common.pool import arena
from services.common.pool.arena import missing_bytes
from services.common.pool.directory import pool_directories
from services.common.pool.layout import Dtype, PoolLayout
from services.common.pool.locks import is_held
from services.common.pool.sizing import MemoryPlan
from services.common.pool.stamps import record_bytes
from services.engine.membership import Membership, join, join_colder

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
    """Joins as a worker; keyword arguments change the usual ones. Locks end with the test."""
    members: list[Membership] = []

    async def joined(
        worker_id: str,
        layout: PoolLayout = LAYOUT,
        run_id: str = RUN_ID,
        plan: MemoryPlan = PLAN,
        store: MemoryStore = store,
    ) -> Membership:
        members.append(await join(store, run_id, tmp_path, layout, worker_id, plan, watermark=0.2))
        return members[-1]

    yield joined
    for member in members:
        member.pool.close()
        member.stamps.close()
        member.lock.close()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def die(member: Membership) -> None:
    """What the kernel does for a killed process."""
    member.lock.close()


async def test_the_first_makes_the_pool_and_the_second_shares_it(
    joined: Join, store: MemoryStore
) -> None:
    first, second = await joined("prefill-1"), await joined("decode-1")
    assert first.spec == second.spec
    assert (first.spec.num_blocks, first.spec.block_size, first.spec.watermark_blocks) == (11, 4, 2)
    assert (await store.stats(first.spec.pool_id)).worker_ids == ("decode-1", "prefill-1")
    first.pool.kv[10, 1, 1, 3, 2, 4] = 7.0
    assert second.pool.kv[10, 1, 1, 3, 2, 4] == 7.0
    assert second.pool.kv.shape == (11, 2, 2, 4, 3, 5)
    first.stamps.own([10], "h")
    assert second.stamps.read(10) == first.stamps.read(10)
    assert is_held(first.directory.lock_path("prefill-1"))


async def test_a_worker_is_locked_before_the_store_knows_it(
    joined: Join, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies right after it has registered is seen to die, like any other."""
    register, was_held = store.register_worker, []

    async def watched(spec: PoolSpec, worker_id: str, recovery: Recovery) -> None:
        (directory,) = pool_directories(tmp_path)
        was_held.append(is_held(directory.lock_path(worker_id)))
        await register(spec, worker_id, recovery)

    monkeypatch.setattr(store, "register_worker", watched)
    await joined("prefill-1")
    await joined("decode-1")
    assert was_held == [True, True]


async def test_files_are_private_and_in_memory(joined: Join) -> None:
    directory = (await joined("prefill-1")).directory
    for path in (
        directory.kv,
        directory.stamps,
        directory.header,
        directory.lock_path("prefill-1"),
    ):
        assert path.stat().st_mode & 0o777 == 0o600, path
    for path in (directory.path, directory.workers):
        assert path.stat().st_mode & 0o777 == 0o700, path
    assert directory.kv.stat().st_blocks * 512 >= 11 * LAYOUT.block_bytes


async def test_a_colder_pool_is_a_pool_beside_the_one_whose_blocks_it_takes(
    joined: Join, store: MemoryStore, tmp_path: Path
) -> None:
    """Both workers share it; who joins by the weights never gets into it; it ends with its last."""
    first, second = await joined("prefill-1"), await joined("decode-1")
    assert PLAN.pool_bytes is not None
    colder = [await join_colder(member, PLAN.pool_bytes) for member in (first, second)]
    assert colder[0].spec == colder[1].spec != first.spec
    assert colder[0].header.colder_of == first.spec.pool_id
    assert (colder[0].spec.num_blocks, colder[0].spec.watermark_blocks) == (NUM_BLOCKS, 0)
    third = await joined("decode-2")
    assert third.spec == first.spec
    assert set(await store.pool_ids()) == {first.spec.pool_id, colder[0].spec.pool_id}
    colder[0].pool.kv[10, 1, 1, 3, 2, 4] = 7.0
    assert colder[1].pool.kv[10, 1, 1, 3, 2, 4] == 7.0
    for member in colder:
        await member.leave()
    assert await store.pool_ids() == (first.spec.pool_id,)
    assert [directory.pool_id for directory in pool_directories(tmp_path)] == [first.spec.pool_id]


async def test_swap_memory_that_is_not_there_is_named(joined: Join, store: MemoryStore) -> None:
    first = await joined("prefill-1")
    with pytest.raises(StartupError, match=r"swap memory: .* is not available"):
        await join_colder(first, 1 << 60)
    assert await store.pool_ids() == (first.spec.pool_id,)


async def test_the_last_one_out_takes_the_pool_away(
    joined: Join, store: MemoryStore, tmp_path: Path
) -> None:
    first, second = await joined("prefill-1"), await joined("decode-1")
    await first.leave()
    assert second.directory.worker_ids() == ("decode-1",)
    assert (await store.stats(second.spec.pool_id)).worker_ids == ("decode-1",)
    await second.leave()
    await second.leave()
    assert pool_directories(tmp_path) == ()
    assert await store.pool_ids() == ()
    assert names(tmp_path) == ["host.lock"]


async def test_many_who_join_at_once_make_one_pool(joined: Join, tmp_path: Path) -> None:
    members = await asyncio.gather(*(joined(f"decode-{number}") for number in range(8)))
    assert len({member.spec.pool_id for member in members}) == 1
    assert len(pool_directories(tmp_path)) == 1


async def test_other_weights_get_a_pool_of_their_own(joined: Join, tmp_path: Path) -> None:
    members = [
        await joined("decode-1"),
        await joined("decode-2", layout=replace(LAYOUT, fingerprint="beef")),
    ]
    assert len({member.spec.pool_id for member in members}) == 2
    assert len(pool_directories(tmp_path)) == 2


async def test_who_joins_a_pool_that_the_store_has_lost_tells_it(joined: Join) -> None:
    """And the worker that was there before may hold something of it."""
    before, emptied = await joined("decode-1"), MemoryStore()
    member = await joined("decode-2", run_id="run-2", store=emptied)
    assert member.spec == before.spec
    header = member.directory.read_header()
    assert (header.run_id, header.ledger_epoch) == ("run-2", 2)
    stats = await emptied.stats(member.spec.pool_id)
    assert (stats.ledger_epoch, stats.missing_worker_ids) == (2, ("decode-1",))
    assert stats.worker_ids == ("decode-1", "decode-2")


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, block_size=8),
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, num_layers=3),
    ],
)
async def test_another_geometry_of_the_same_weights_is_refused_with_both(
    joined: Join, other: PoolLayout
) -> None:
    first = await joined("decode-1")
    with pytest.raises(StartupError, match=f"{first.spec.pool_id} .*another geometry.*this worker"):
        await joined("decode-2", layout=other)
    assert first.directory.worker_ids() == ("decode-1",)


async def test_a_dead_pool_is_removed_and_never_joined_again(
    joined: Join, store: MemoryStore, tmp_path: Path
) -> None:
    dead = await joined("decode-1")
    die(dead)
    (tmp_path / ".half-a-pool" / "workers").mkdir(parents=True)
    alive = await joined("decode-2")
    assert alive.spec.pool_id != dead.spec.pool_id
    assert await store.pool_ids() == (alive.spec.pool_id,)
    assert names(tmp_path) == ["host.lock", alive.spec.pool_id]


async def test_a_pool_with_one_dead_and_one_living_worker_is_alive(joined: Join) -> None:
    first, second = await joined("prefill-1"), await joined("decode-1")
    die(first)
    third = await joined("prefill-2")
    assert third.spec == second.spec


@pytest.mark.parametrize("pool_bytes", [1 << 60, 100])
async def test_memory_that_does_not_do_is_a_clear_error_and_leaves_nothing(
    joined: Join, store: MemoryStore, tmp_path: Path, pool_bytes: int
) -> None:
    with pytest.raises(StartupError, match="bytes"):
        await joined("decode-1", plan=MemoryPlan(pool_bytes))
    assert names(tmp_path) == ["host.lock"]
    assert await store.pool_ids() == ()


async def test_measured_memory_is_used_when_none_is_given(
    joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engine.membership.available_bytes", lambda root: 100_000)
    plan = MemoryPlan(None, num_expected_workers=2, weight_bytes=10_000, activation_bytes=5_000)
    member = await joined("decode-1", plan=plan)
    assert member.spec.num_blocks == 40_000 // (LAYOUT.block_bytes + record_bytes(4)) == 39


@pytest.fixture
def small_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining allocates one page of the arena."""
    monkeypatch.setattr(arena, "FIRST_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(arena, "_PIECE_BYTES", mmap.PAGESIZE)


@pytest.mark.usefixtures("small_front")
async def test_workers_allocate_the_rest_together_while_they_use_it(joined: Join) -> None:
    first, second = await joined("prefill-1"), await joined("decode-1")
    kv = first.directory.kv
    assert missing_bytes(kv) == first.header.arena_bytes - mmap.PAGESIZE
    first.pool.kv[10] = 7.0
    await asyncio.gather(first.complete_memory(), second.complete_memory())
    assert missing_bytes(kv) == 0
    assert torch.all(second.pool.kv[10] == 7.0)
    assert not second.pool.kv[:10].any()
    await first.complete_memory()
    assert torch.all(second.pool.kv[10] == 7.0)


@pytest.mark.usefixtures("small_front")
async def test_who_joins_later_goes_on_for_who_died(joined: Join) -> None:
    first, second = await joined("prefill-1"), await joined("decode-1")
    die(first)
    assert missing_bytes(second.directory.kv) > 0
    await second.complete_memory()
    assert missing_bytes(second.directory.kv) == 0


@pytest.mark.usefixtures("small_front")
async def test_a_worker_that_leaves_stops_allocating(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, allowed, pieces = threading.Event(), threading.Event(), []

    def slowly(fd: int, start: int, num_bytes: int) -> None:
        pieces.append(start)
        begun.set()
        assert allowed.wait(10)

    member = await joined("decode-1")
    monkeypatch.setattr(arena, "_allocate", slowly)
    allocating = asyncio.create_task(member.complete_memory())
    await asyncio.to_thread(begun.wait, 10)
    allocating.cancel()
    await asyncio.wait([allocating])
    await member.leave()
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("arena")]
    allowed.set()
    await asyncio.to_thread(thread.join, 10)
    assert pieces == [mmap.PAGESIZE]
    assert names(tmp_path) == ["host.lock"]


@pytest.mark.usefixtures("small_front")
async def test_memory_that_another_pool_will_still_take_is_not_given_twice(
    joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await joined("decode-1")
    missing = missing_bytes(first.directory.kv)
    assert missing > 0
    monkeypatch.setattr("services.engine.membership.available_bytes", lambda root: 100_000)
    second = await joined("decode-2", replace(LAYOUT, fingerprint="beef"), plan=MemoryPlan(None))
    bytes_per_block = LAYOUT.block_bytes + record_bytes(4)
    assert second.spec.num_blocks == (100_000 - missing) // 2 // bytes_per_block


class Refusing(MemoryStore):
    """Registers no worker."""

    async def register_worker(
        self, spec: PoolSpec, worker_id: str, recovery: Recovery | None = None
    ) -> None:
        raise StoreUnavailable("no answer")


async def test_a_join_that_the_store_does_not_answer_leaves_nothing(
    joined: Join, tmp_path: Path
) -> None:
    store = Refusing()
    with pytest.raises(StoreUnavailable):
        await joined("decode-1", store=store)
    assert names(tmp_path) == ["host.lock"]
    assert await store.pool_ids() == ()


async def test_a_worker_that_still_holds_blocks_is_left_to_the_reaper(
    joined: Join, store: MemoryStore
) -> None:
    member = await joined("decode-1")
    await store.allocate(member.spec.pool_id, "h", "decode-1", 1, [], 2)
    with pytest.raises(WorkerNotEmpty):
        await member.leave()
    assert member.directory.worker_ids() == ("decode-1",)
    assert not member.directory.is_live()
    assert await store.reap(member.spec.pool_id, "decode-1") == 1


class Lost(MemoryStore):
    async def leave(self, pool_id: str, worker_id: str) -> None:
        raise StoreLost("another server")


async def test_leaving_a_lost_store_still_takes_the_directory_away(
    joined: Join, tmp_path: Path
) -> None:
    member = await joined("decode-1", store=Lost())
    await member.leave()
    assert pool_directories(tmp_path) == ()


async def test_after_leaving_the_arena_is_closed(joined: Join) -> None:
    member = await joined("decode-1")
    await member.leave()
    with pytest.raises(RuntimeError, match="closed"):
        _ = member.pool.kv


WRITE = """
import sys
from pathlib import Path
from services.common.pool.directory import PoolDirectory
from services.common.pool.stamps import Stamps
from services.engine.pool import KVPool

directory = PoolDirectory(Path(sys.argv[1]))
header = directory.read_header()
pool = KVPool(directory.kv, header.layout, header.num_blocks)
stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
stamps.own([3], "h")
pool.kv[3] = 1.5
stamps.complete(3, bytes([7]) * 16, bytes(16), [1, 2, 3, 4])
print(tuple(pool.kv.shape), pool.kv.dtype, float(pool.kv[4, 0, 0, 0, 0, 0]))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_one_process_writes_another_reads(joined: Join, dtype: Dtype) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    member = await joined("prefill-1", layout=layout)
    member.pool.kv[4] = -2.0
    output = await asyncio.to_thread(
        subprocess.check_output,
        [sys.executable, "-c", WRITE, str(member.directory.path)],
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert output.strip() == f"({member.spec.num_blocks}, 2, 2, 4, 3, 5) torch.{dtype} -2.0"
    assert torch.equal(member.pool.kv[3], torch.full_like(member.pool.kv[3], 1.5))
    assert member.pool.kv[2].count_nonzero() == 0
    assert member.stamps.first_mismatch([3], bytes(16), [bytes([7]) * 16], [1, 2, 3, 4]) is None


async def test_an_arena_of_another_size_is_not_mapped(joined: Join) -> None:
    """Mapping would stretch the file to the size that was asked for."""
    member = await joined("decode-1")
    os.truncate(member.directory.kv, 100)
    with pytest.raises(ValueError, match="100 bytes instead of"):
        await joined("decode-2")
    assert member.directory.kv.stat().st_size == 100
    assert member.directory.worker_ids() == ("decode-1",)
