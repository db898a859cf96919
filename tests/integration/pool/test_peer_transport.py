"""Copies between the pools of two GPUs of a host, which are memory of the host here."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from blockstore.memory_store import MemoryStore
from kvops.cuda.memfd import MemfdDriver
from kvops.cuda.vmm import DriverError
from services.mover import peer_transport
from services.mover.peer_transport import PeerTransport, map_own
from services.mover.transport import Area, OutOfReach, State, TransportError, stamps_region
from services.pool.keeper import KeeperRefusal, borrow
from services.pool.sizing import MemoryPlan
from services.pool.stamps import Stamps
from services.runtime.errors import StartupError
from services.worker.membership import Membership, join

from .conftest import LAYOUT, NUM_BLOCKS, RUN_ID
from .test_gpu_pool import keeping, on_gpu

PLAN = MemoryPlan(pool_bytes=NUM_BLOCKS * LAYOUT.block_bytes)


class LateGpu(MemfdDriver):
    """A GPU that copies when the test says so, or fails."""

    pending: ClassVar[list[Callable[[], None]]] = []
    maps_writable: ClassVar[list[bool]] = []
    error: ClassVar[DriverError | None] = None
    map_error: ClassVar[DriverError | None] = None

    def map(self, handle: int, num_bytes: int, writable: bool) -> int:
        if LateGpu.map_error is not None:
            raise LateGpu.map_error
        LateGpu.maps_writable.append(writable)
        return super().map(handle, num_bytes, writable)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.pending.append(partial(super().copy, target, source, num_bytes))

    def mark(self) -> Callable[[], bool]:
        def is_done() -> bool:
            if LateGpu.error is not None:
                raise LateGpu.error
            return not LateGpu.pending

        return is_done

    @classmethod
    def catch_up(cls) -> None:
        while cls.pending:
            cls.pending.pop(0)()


@dataclass
class Gpus:
    """Pools on two GPUs, each with a worker; `b` is the pool of the transport's mover."""

    a: Membership
    b: Membership
    transport: PeerTransport
    failures: list[str]

    def memory(self) -> bytes:
        """The description that the mover of pool a gives to others."""
        there = PeerTransport(self.a.directory, self.a.header, self.failures.append)
        return there.share(*(stamps_region(self.a.stamps, self.a.header),) * 2)


@pytest.fixture
async def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gpus]:
    LateGpu.pending, LateGpu.maps_writable, LateGpu.error = [], [], None
    LateGpu.map_error = None

    def driver_of(uuid: str) -> MemfdDriver:
        if not uuid.startswith("MEMFD-"):
            raise DriverError(f"{uuid} is none of the 2 GPUs that this process sees")
        return LateGpu(int(uuid.removeprefix("MEMFD-")))

    monkeypatch.setattr(peer_transport, "driver_of", driver_of)
    roots = [tmp_path / name for name in "ab"]
    for root in roots:
        root.mkdir()
    async with keeping(roots[0]), keeping(roots[1]):
        a, b = [
            await join(MemoryStore(), RUN_ID, root, LAYOUT, "worker", PLAN, memory=on_gpu(number))
            for number, root in enumerate(roots)
        ]
        failures: list[str] = []
        gpus = Gpus(a, b, PeerTransport(b.directory, b.header, failures.append), failures)
        yield gpus
        gpus.transport.close()
        for member in (a, b):
            member.close()


async def test_the_gpu_copies_blocks_beside_the_mover(gpus: Gpus) -> None:
    """Nothing is there before the copy is done. Blocks that are neighbours are one copy. The other
    pool is mapped to be read only."""
    assert gpus.b.kept is not None
    source = await asyncio.to_thread(gpus.transport.connect, gpus.memory())
    target = map_own(gpus.b.header, [os.dup(fd) for fd in gpus.b.kept.fds])
    assert LateGpu.maps_writable == [False, True]
    for block in range(NUM_BLOCKS):
        gpus.a.pool.kv[block] = float(block + 1)
    read = gpus.transport.read(source, Area.BLOCKS, [4, 5, 6, 9], target, [1, 2, 3, 0])
    assert len(LateGpu.pending) == 2
    assert read.poll() is State.RUNNING
    assert not gpus.b.pool.kv.any()
    LateGpu.catch_up()
    assert read.poll() is State.DONE
    read.release()
    wanted = torch.zeros(NUM_BLOCKS)
    wanted[:4] = torch.tensor([10.0, 5.0, 6.0, 7.0])
    assert torch.equal(gpus.b.pool.kv.flatten(1).amax(1), wanted)
    assert torch.equal(gpus.b.pool.kv.flatten(1).amin(1), wanted)
    gpus.transport.disconnect(source)
    gpus.transport.forget(target)


async def test_stamps_are_read_as_they_are_now(gpus: Gpus) -> None:
    """Those before and after a copy show whether the block was given to another owner."""
    source = await asyncio.to_thread(gpus.transport.connect, gpus.memory())
    found = Stamps(None, NUM_BLOCKS, LAYOUT.block_size)
    target = gpus.transport.prepare(stamps_region(found, gpus.a.header))
    records = []
    for owner in ("holder-1", "holder-2"):
        gpus.a.stamps.mark_owned([3], owner)
        read = gpus.transport.read(source, Area.STAMPS, [3], target, [3])
        assert read.poll() is State.DONE
        assert found.are_written_by([3], owner)
        records.append(found.record(3))
    assert records[0] != records[1]
    gpus.transport.disconnect(source)


async def test_a_copy_that_fails_ends_the_process(gpus: Gpus) -> None:
    """A GPU's context may be unusable after an error."""
    source = await asyncio.to_thread(gpus.transport.connect, gpus.memory())
    region = gpus.transport.allocate(1, LAYOUT.block_bytes, 2)
    read = gpus.transport.read(source, Area.BLOCKS, [1], region, [0])
    LateGpu.error = DriverError("cuEventSynchronize on cuda:1: CUDA_ERROR_LAUNCH_FAILED (719)")
    assert read.poll() is State.FAILED
    assert gpus.failures == [str(LateGpu.error)]
    gpus.transport.forget(region)
    gpus.transport.disconnect(source)


async def test_a_pool_out_of_reach_is_refused_with_the_reason(gpus: Gpus) -> None:
    described = json.loads(gpus.memory())

    async def refused(kind: type[TransportError], reason: str, **changes: str) -> None:
        with pytest.raises(kind, match=reason):
            await asyncio.to_thread(
                gpus.transport.connect, json.dumps(described | changes).encode()
            )

    await refused(OutOfReach, "it is on GPUs of another host", host="another")
    await refused(TransportError, "no access .*No such file", pool="/nowhere/tiny")
    with pytest.raises(TransportError, match="no access to the memory of a pool"):
        gpus.transport.connect(b"{")

    LateGpu.map_error = DriverError("cuMemSetAccess on cuda:1: CUDA_ERROR_INVALID_DEVICE (101)")
    await refused(OutOfReach, "a GPU cannot map it: cuMemSetAccess on cuda:1")


async def test_only_a_pool_that_the_keeper_has_can_be_read(gpus: Gpus) -> None:
    root = gpus.a.directory.path.parent
    with pytest.raises(KeeperRefusal, match="is not a name"):
        await asyncio.to_thread(borrow, root, "absent-1")


async def test_an_own_gpu_that_is_not_there_is_a_start_that_fails(gpus: Gpus) -> None:
    with pytest.raises(StartupError, match=r"cannot map the pool tiny-.* none of the 2 GPUs"):
        map_own(replace(gpus.b.header, gpu_uuids=("GPU-9",)), [])
