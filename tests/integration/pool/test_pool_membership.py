"""Joining and leaving pools: the first worker makes a pool, the last one removes it, and all share
it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockstore.errors import StoreLost, StoreUnavailable, WorkerNotEmpty
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.store import MarkOwned, Recovery
from services.pool.directory import pool_directories
from services.pool.layout import PoolLayout
from services.pool.locks import is_held
from services.pool.sizing import MemoryPlan
from services.runtime.errors import StartupError
from services.worker.membership import join_swap_pool

from .conftest import LAYOUT, NUM_BLOCKS, PLAN, Join, die, names


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
    first.stamps.mark_owned([10], "h")
    assert second.stamps.read(10) == first.stamps.read(10)
    assert is_held(first.directory.lock_path("prefill-1"))


async def test_a_worker_is_locked_before_the_store_knows_it(joined: Join, tmp_path: Path) -> None:
    """So a worker that dies right after it has registered is detected like any other."""
    was_held: list[bool] = []

    class Watched(MemoryStore):
        async def register_worker(
            self, spec: PoolSpec, worker_id: str, *args: Any, **named: Any
        ) -> None:
            (directory,) = pool_directories(tmp_path)
            was_held.append(is_held(directory.lock_path(worker_id)))
            await super().register_worker(spec, worker_id, *args, **named)

    store = Watched()
    await joined("prefill-1", store=store)
    await joined("decode-1", store=store)
    assert was_held == [True, True]


async def test_a_colder_pool_is_a_pool_beside_the_one_whose_blocks_it_takes(
    joined: Join, store: MemoryStore, tmp_path: Path
) -> None:
    """Both workers share it; a worker cannot join it by its weights; its last worker removes it."""
    first, second = await joined("prefill-1"), await joined("decode-1")
    assert PLAN.pool_bytes is not None
    swap_pool = [await join_swap_pool(member, PLAN.pool_bytes) for member in (first, second)]
    assert swap_pool[0].spec == swap_pool[1].spec != first.spec
    assert swap_pool[0].header.colder_of == first.spec.pool_id
    assert (swap_pool[0].spec.num_blocks, swap_pool[0].spec.watermark_blocks) == (NUM_BLOCKS, 0)
    third = await joined("decode-2")
    assert third.spec == first.spec
    assert set(await store.pool_ids()) == {first.spec.pool_id, swap_pool[0].spec.pool_id}
    swap_pool[0].pool.kv[10, 1, 1, 3, 2, 4] = 7.0
    assert swap_pool[1].pool.kv[10, 1, 1, 3, 2, 4] == 7.0
    for member in swap_pool:
        await member.leave()
    assert await store.pool_ids() == (first.spec.pool_id,)
    assert [directory.pool_id for directory in pool_directories(tmp_path)] == [first.spec.pool_id]


async def test_the_last_worker_that_leaves_removes_the_pool(
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


async def test_workers_that_join_at_once_make_one_pool(joined: Join, tmp_path: Path) -> None:
    members = await asyncio.gather(*(joined(f"decode-{number}") for number in range(8)))
    assert len({member.spec.pool_id for member in members}) == 1
    assert len(pool_directories(tmp_path)) == 1


@pytest.mark.parametrize("other", [{"fingerprint": "beef"}, {"model": "copy"}])
async def test_other_weights_and_other_models_get_a_pool_of_their_own(
    joined: Join, tmp_path: Path, other: dict[str, str]
) -> None:
    """A copy of a checkpoint with another chat template is another model with the same weights."""
    members = [
        await joined("decode-1"),
        await joined("decode-2", layout=replace(LAYOUT, **other)),  # type: ignore[arg-type]
    ]
    assert len({member.spec.pool_id for member in members}) == 2
    assert len(pool_directories(tmp_path)) == 2


async def test_a_worker_that_joins_a_lost_pool_reports_it(joined: Join) -> None:
    """The worker that was there before may hold blocks of it."""
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
async def test_a_different_geometry_of_the_same_weights_is_refused_with_both(
    joined: Join, other: PoolLayout
) -> None:
    first = await joined("decode-1")
    with pytest.raises(StartupError, match=f"{first.spec.pool_id} .*another geometry.*this worker"):
        await joined("decode-2", layout=other)
    assert first.directory.worker_ids() == ("decode-1",)


async def test_a_pool_of_several_ranks_has_an_arena_for_each(joined: Join) -> None:
    """Each arena has the same number of blocks; `pool_memory` is the sum of all."""
    plan = MemoryPlan(pool_bytes=200_000)
    layout = replace(LAYOUT, tensor_parallel_size=4, model="other", fingerprint="beef")
    alone = await joined("decode-1", plan=plan)
    parted = await joined("decode-2", layout=layout, plan=plan)
    arenas = parted.directory.arenas
    assert [path.name for path in arenas] == ["kv", "kv.1", "kv.2", "kv.3"]
    assert {path.stat().st_size for path in arenas} == {parted.header.arena_bytes}
    assert parted.spec.block_bytes == 4 * alone.spec.block_bytes
    assert parted.spec.num_blocks < alone.spec.num_blocks / 3


async def test_a_worker_of_another_number_of_ranks_is_refused_with_both(joined: Join) -> None:
    """Its fingerprint differs, too, but a pool of its own would have no other worker."""
    first = await joined("decode-1")
    parted = replace(LAYOUT, tensor_parallel_size=2, fingerprint="beef")
    text = f"{first.spec.pool_id} .*workers of 1 ranks.*tensor_parallel_size 2"
    with pytest.raises(StartupError, match=text):
        await joined("decode-2", layout=parted)
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


class Refusing(MemoryStore):
    """A store that registers no worker."""

    async def register_worker(
        self,
        spec: PoolSpec,
        worker_id: str,
        recovery: Recovery | None = None,
        mark_owned: MarkOwned | None = None,
        lease_ms: int = 0,
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
