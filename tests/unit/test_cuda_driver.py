"""The driver of CUDA GPUs: its calls of cuda-bindings, with the real package's types and signatures
over memory of the host (tests/cuda_bindings.py). It has not run on a GPU."""

import gc
import os
from types import ModuleType
from typing import Any, cast

import pytest

from kvops.cuda.cuda_driver import CudaDriver, number_of
from kvops.cuda.vmm import LOST_CODES, DeviceLost, DriverError, SharedMemory, allocation_bytes
from tests.cuda_bindings import NAME, CudaWithoutGpu

SIZE = 4 << 20
NO_FABRIC = {"HANDLE_TYPE_FABRIC_SUPPORTED": 0}


def driver_of(cuda: CudaWithoutGpu, number: int = 1) -> CudaDriver:
    return CudaDriver(number, cast(ModuleType, cuda))


def test_a_pool_is_one_allocation_that_others_map() -> None:
    cuda = CudaWithoutGpu(**NO_FABRIC)
    driver = driver_of(cuda)
    memory = SharedMemory.create(driver, SIZE)
    (properties,) = cuda.properties
    assert cuda.requested == [1]
    assert properties.type.name == "CU_MEM_ALLOCATION_TYPE_PINNED"
    assert properties.location.type.name == "CU_MEM_LOCATION_TYPE_DEVICE"
    assert properties.location.id == 1
    assert properties.allocFlags.gpuDirectRDMACapable == 1
    assert os.pread(memory.fd, 8, 0) == bytes(8), "it is zeroed"
    os.pwrite(memory.fd, b"KV", SIZE - 2)

    other_process = CudaWithoutGpu()
    other = SharedMemory.open(driver_of(other_process), os.dup(memory.fd), SIZE)
    memory.close()
    gc.collect()
    assert os.pread(other.fd, 2, SIZE - 2) == b"KV", "it outlives its creator"
    assert (cuda.calls["cuMemCreate"], other_process.calls["cuMemCreate"]) == (1, 0)
    assert not cuda.handles | set(cuda.reserved) | set(cuda.mapped)
    other.close()
    gc.collect()
    assert not other_process.handles | set(other_process.reserved) | set(other_process.mapped)


def test_memory_may_be_mapped_to_read_only() -> None:
    """The driver forbids writes; no tensor of PyTorch does."""
    cuda = CudaWithoutGpu()
    driver = driver_of(cuda)
    memory = SharedMemory.create(driver, SIZE)
    (written,) = cuda.mapped
    shared = SharedMemory.open(driver, os.dup(memory.fd), SIZE, writable=False)
    assert cuda.read_only == set(cuda.mapped) - {written}
    memory.close()
    shared.close()


def test_memory_that_the_driver_cannot_protect_is_mapped_all_the_same() -> None:
    cuda = CudaWithoutGpu(PROTECTS=0)
    driver = driver_of(cuda)
    memory = SharedMemory.create(driver, SIZE)
    shared = SharedMemory.open(driver, os.dup(memory.fd), SIZE, writable=False)
    assert cuda.accessible == set(cuda.mapped)
    assert not cuda.read_only
    memory.close()
    shared.close()


def test_fabric_handles_are_asked_for_where_the_device_has_them() -> None:
    cuda = CudaWithoutGpu()
    SharedMemory.create(driver_of(cuda), SIZE).close()
    assert cuda.requested == [1 | 8]


@pytest.mark.parametrize("error", [1, 800, 801])
def test_fabric_handles_that_are_refused_are_no_error(error: int) -> None:
    """The device has them, and this process may not make them, as without an IMEX channel. Drivers
    say so with several errors."""
    without_imex = CudaWithoutGpu(IMEX=0, IMEX_ERROR=error)
    SharedMemory.create(driver_of(without_imex), SIZE).close()
    assert without_imex.requested == [1]


def test_a_device_that_permits_no_rdma_is_not_asked_for_it() -> None:
    cuda = CudaWithoutGpu(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=0)
    SharedMemory.create(driver_of(cuda), SIZE).close()
    assert cuda.properties[0].allocFlags.gpuDirectRDMACapable == 0


def test_a_tensor_keeps_the_mapping() -> None:
    """PyTorch holds the object from which it made the tensor."""
    cuda = CudaWithoutGpu()
    memory = SharedMemory.create(driver_of(cuda), SIZE)
    owner = memory._mapping
    assert owner is not None
    interface = owner.__cuda_array_interface__
    assert interface["data"] == (owner.pointer, False)
    assert (interface["shape"], interface["typestr"]) == ((SIZE,), "|u1")
    memory.close()
    gc.collect()
    assert cuda.mapped
    del owner
    gc.collect()
    assert not cuda.mapped


@pytest.mark.parametrize(
    "call",
    [
        *("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"),
        *("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"),
    ],
)
def test_a_call_that_fails_is_named_and_leaves_nothing(call: str) -> None:
    cuda = CudaWithoutGpu()
    driver = driver_of(cuda)
    fds = len(os.listdir("/proc/self/fd"))
    cuda.fails[call] = 2

    def use() -> None:
        if call == "cuMemImportFromShareableHandle":
            SharedMemory.open(driver, os.memfd_create("other"), SIZE)
        else:
            SharedMemory.create(driver, SIZE)

    with pytest.raises(DriverError, match=rf"{call} on cuda:1: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        use()
    assert not cuda.handles | set(cuda.reserved) | set(cuda.mapped)
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize("code", [2, 700, 719, *sorted(LOST_CODES)])
def test_only_a_lost_device_is_a_lost_pool(code: int) -> None:
    """An illegal address ends a process's context, and the memory stays as it is."""
    cuda = CudaWithoutGpu()
    driver = driver_of(cuda)
    cuda.fails["cuMemMap"] = code
    with pytest.raises(DriverError) as raised:
        SharedMemory.create(driver, SIZE)
    assert isinstance(raised.value, DeviceLost) == (code in LOST_CODES)


def test_facts_of_the_device() -> None:
    driver = driver_of(CudaWithoutGpu())
    assert driver.uuid == NAME
    assert driver.free_and_total_bytes() == (60 << 30, 80 << 30)
    assert allocation_bytes(driver, 1) == 2 << 20
    assert allocation_bytes(driver, 4 << 20) == 4 << 20


def test_a_device_that_is_not_there_or_too_old_is_refused() -> None:
    with pytest.raises(DriverError, match=r"cuDeviceGet on cuda:2: CUDA_ERROR_INVALID_DEVICE"):
        driver_of(CudaWithoutGpu(), 2)
    with pytest.raises(DriverError, match="no virtual memory management"):
        driver_of(CudaWithoutGpu(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=0))


def test_copies_are_done_when_their_event_has_passed() -> None:
    """Copies from memory that is mapped read only, as another GPU is; errors are named."""
    cuda = CudaWithoutGpu()
    driver = driver_of(cuda)
    own = SharedMemory.create(driver, SIZE)
    other = SharedMemory.create(driver, SIZE)
    os.pwrite(other.fd, b"KV", 0)
    theirs = SharedMemory.open(driver, os.dup(other.fd), SIZE, writable=False)
    queue = driver.copies()
    queue.copy(own.pointer, theirs.pointer, SIZE)
    is_done = queue.mark()
    assert not is_done()
    assert os.pread(own.fd, 2, 0) == bytes(2)
    cuda.copy_queued()
    assert is_done()
    assert os.pread(own.fd, 2, 0) == b"KV"
    assert cuda.events == 0
    cuda.fails["cuEventSynchronize"] = 719
    with pytest.raises(DriverError, match=r"cuEventSynchronize on cuda:1: CUDA_ERROR_LAUNCH"):
        queue.mark()()
    for memory in (own, other, theirs):
        memory.close()


def test_a_device_is_found_by_its_uuid() -> None:
    cuda = CudaWithoutGpu()
    assert number_of(NAME, cast(Any, cuda)) == 0
    with pytest.raises(DriverError, match="GPU-1 is none of the 2 GPUs that this process sees"):
        number_of("GPU-1", cast(Any, cuda))
    assert not cuda.calls["cuDevicePrimaryCtxRetain"]
