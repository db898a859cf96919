"""A pool's memory: its size, the process and the time of its allocation, and its mapping by all
workers."""

import asyncio
import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockstore.memory_store import MemoryStore
from services.pool import arena
from services.pool.arena import missing_bytes
from services.pool.layout import Dtype
from services.pool.sizing import MemoryPlan
from services.pool.stamps import record_bytes
from services.runtime.errors import StartupError
from services.worker.membership import join_swap_pool
from services.worker.pool_memory import FileMemory

from .conftest import LAYOUT, Join, die, names


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


async def test_swap_memory_that_is_not_there_is_named(joined: Join, store: MemoryStore) -> None:
    first = await joined("prefill-1")
    with pytest.raises(StartupError, match=r"swap memory: .* is not available"):
        await join_swap_pool(first, 1 << 60)
    assert await store.pool_ids() == (first.spec.pool_id,)


@pytest.mark.parametrize("pool_bytes", [1 << 60, 100])
async def test_memory_that_does_not_do_is_a_clear_error_and_leaves_nothing(
    joined: Join, store: MemoryStore, tmp_path: Path, pool_bytes: int
) -> None:
    with pytest.raises(StartupError, match="bytes"):
        await joined("decode-1", plan=MemoryPlan(pool_bytes))
    assert names(tmp_path) == ["host.lock"]
    assert await store.pool_ids() == ()


async def test_measured_memory_is_used_when_none_is_given(joined: Join) -> None:
    plan = MemoryPlan(None, num_expected_workers=2, weight_bytes=10_000, activation_bytes=5_000)
    member = await joined("decode-1", plan=plan, memory=FileMemory(lambda root: 100_000))
    assert member.spec.num_blocks == 40_000 // (LAYOUT.block_bytes + record_bytes(4)) == 39


@pytest.fixture
def small_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining allocates only one page of the arena."""
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
async def test_a_later_worker_continues_a_dead_workers_pool(joined: Join) -> None:
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
    joined: Join,
) -> None:
    first = await joined("decode-1")
    missing = missing_bytes(first.directory.kv)
    assert missing > 0
    second = await joined(
        "decode-2",
        replace(LAYOUT, fingerprint="beef"),
        plan=MemoryPlan(None),
        memory=FileMemory(lambda root: 100_000),
    )
    bytes_per_block = LAYOUT.block_bytes + record_bytes(4)
    assert second.spec.num_blocks == (100_000 - missing) // 2 // bytes_per_block


async def test_after_leaving_the_arena_is_closed(joined: Join) -> None:
    member = await joined("decode-1")
    await member.leave()
    with pytest.raises(RuntimeError, match="closed"):
        _ = member.pool.kv


WRITE = """
import sys
from pathlib import Path
from services.pool.directory import PoolDirectory
from services.pool.stamps import Stamps
from services.engine.pool import FileArena, KVPool

directory = PoolDirectory(Path(sys.argv[1]))
header = directory.read_header()
arena = FileArena(directory.kv, header.arena_bytes)
pool = KVPool(arena, header.layout, header.num_blocks)
stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
stamps.mark_owned([3], "h")
pool.kv[3] = 1.5
stamps.complete(3, bytes([7]) * 16, bytes(16), [1, 2, 3, 4])
print(tuple(pool.kv.shape), pool.kv.dtype, float(pool.kv[4, 0, 0, 0, 0, 0]))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_writes_of_one_process_are_read_by_another(joined: Join, dtype: Dtype) -> None:
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
    """The mapping would extend the file to the requested size."""
    member = await joined("decode-1")
    os.truncate(member.directory.kv, 100)
    with pytest.raises(ValueError, match="100 bytes instead of"):
        await joined("decode-2")
    assert member.directory.kv.stat().st_size == 100
    assert member.directory.worker_ids() == ("decode-1",)
