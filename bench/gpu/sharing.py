"""Memory that several processes share: handed over without a copy, and quiet after a killed writer.

The other processes are forked from a server that has imported PyTorch and used no GPU. A dry run
has memory of the host, and kills processes that write into it.
"""

import fcntl
import multiprocessing
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from statistics import median
from typing import Any

import torch
from torch import Tensor

import kvops.cuda
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped, micros
from bench.harness import in_turn
from kvops.cuda.vmm import DriverError, SharedMemory
from services.block_manager.gpu.processes import AllProcesses, ProcessListError

MAX_ADDED_S = 1e-3
"""Of a hand-off, beyond the same work in one process (p50)."""

MAX_GROWTH_S = 0.1 * MAX_ADDED_S
"""From 1k to 32k tokens, of which only the block ids are handed over."""

MAX_QUIET_S = 10.0
_BLOCK_BYTES = 2 << 20
_TOKENS = (1024, 32 * 1024)
_BLOCK_SIZE = 16

_context = multiprocessing.get_context("forkserver")


def checks(machine: Machine) -> Iterator[Check]:
    _context.set_forkserver_preload(["bench.gpu.sharing"])
    yield "an arena handed over between two processes", lambda: _hand_off(machine)
    yield "weights that others can only read", lambda: _read_only(machine)
    yield "writers killed in mid-kernel", lambda: _kills(machine)


def _device(machine: Machine) -> str:
    return machine.pick("cuda:0", "memfd:0")


def _made(machine: Machine, num_bytes: int) -> SharedMemory:
    machine.synchronize()  # PyTorch's context is this process's
    try:
        driver = kvops.cuda.driver(_device(machine))
    except kvops.BackendUnavailable as error:
        raise Skipped(f"runs only with cuda-bindings: {error}") from error
    return SharedMemory.create(driver, num_bytes)


def _other(
    machine: Machine,
    memory: SharedMemory,
    work: Callable[..., None],
    *arguments: Any,
    writable: bool = True,
) -> tuple[BaseProcess, Connection]:
    """A process that maps the memory, and does `work(bytes, connection, *arguments)`."""
    ours, theirs = _context.Pipe()
    process = _context.Process(
        target=_in_other,
        args=(memory.num_bytes, writable, work, theirs, arguments),
        kwargs={"device": _device(machine), "fd": DupFd(memory.fd)},
        daemon=True,
    )
    process.start()
    theirs.close()
    return process, ours


def _in_other(
    num_bytes: int,
    writable: bool,
    work: Callable[..., None],
    connection: Connection,
    arguments: tuple[Any, ...],
    *,
    device: str,
    fd: Any,
) -> None:
    if device.startswith("cuda"):
        torch.zeros(1, device=device)
    memory = SharedMemory.open(kvops.cuda.driver(device), fd.detach(), num_bytes, writable)
    work(memory.tensor(), connection, *arguments)


def _answer(values: Tensor, connection: Connection) -> None:
    """Answer lists of blocks with the last one's first value, and None with the copies in the
    profile of one more read."""
    blocks = values.view(-1, _BLOCK_BYTES)
    while (block_ids := connection.recv()) is not None:
        connection.send(_read(blocks, block_ids))
    device = "cuda" if values.is_cuda else None
    with torch.autograd.profiler.profile(use_device=device) as profile:
        _read(blocks, [0])
    names = [event.key for event in profile.key_averages()]
    connection.send([n for n in names if "Memcpy" in n and ("DtoD" in n or "PtoP" in n)])


def _read(blocks: Tensor, block_ids: list[int]) -> int:
    return int(blocks[block_ids[-1]].max())


def _read_then_write(values: Tensor, connection: Connection) -> None:
    connection.send(_read(values.view(-1, _BLOCK_BYTES), [1]))
    values.fill_(1)
    connection.send(int(values[0]))  # waits for the GPU


def _read_only(machine: Machine) -> Passed:
    """Workers share weights: one process fills, another one reads, and a write ends it."""
    memory = _made(machine, 2 * _BLOCK_BYTES)
    values = memory.tensor().fill_(7)
    machine.synchronize()
    process, connection = _other(machine, memory, _read_then_write, writable=False)
    if (found := connection.recv()) != 7:
        raise Failed(f"the other process reads {found} instead of 7")
    try:
        raise Failed(f"it has written, and reads {connection.recv()}")
    except EOFError:
        process.join()
    if changed := int((values != 7).sum()):
        raise Failed(f"a process that maps to read only changed {changed} bytes")
    memory.close()
    return Passed("read by another process, which a write ended")


def _hand_off(machine: Machine) -> Passed:
    """A block of new memory is written, and its table handed over; then it is read. In one process
    and in two, of which the other one copies nothing."""
    memory = _made(machine, 4 * _BLOCK_BYTES)
    blocks = memory.tensor().view(-1, _BLOCK_BYTES)
    if blocks.any():
        raise Failed("new memory is not zero")
    process, connection = _other(machine, memory, _answer)

    def asked(table: list[int]) -> int:
        connection.send(table)
        return int(connection.recv())

    def seconds(read: Callable[[list[int]], int], table: list[int], number: int) -> float:
        blocks[table[-1]] = number % 256
        machine.synchronize()
        began = time.perf_counter()
        found = read(table)
        took_s = time.perf_counter() - began
        if found != number % 256:
            raise Failed(f"{found} instead of {number % 256}, of {len(table)} blocks")
        return took_s

    added: dict[int, float] = {}
    for num_tokens in _TOKENS:
        table = [number % 4 for number in range(num_tokens // _BLOCK_SIZE)]
        calls = {
            "alone": partial(seconds, partial(_read, blocks), table),
            "handed over": partial(seconds, asked, table),
        }
        found = in_turn(calls, machine.pick(300, 5))
        added[num_tokens] = median(found["handed over"]) - median(found["alone"])
    connection.send(None)
    if copies := connection.recv():
        raise Failed(f"the other process copied the arena: {', '.join(copies)}")
    process.join()
    memory.close()
    short, long = added.values()
    wanted = f"at most {MAX_ADDED_S * 1e6:g} us, from short to long {MAX_GROWTH_S * 1e6:g} us more"
    text = micros({f"{tokens} tokens": seconds for tokens, seconds in added.items()})
    return machine.judge(
        max(added.values()) <= MAX_ADDED_S and long - short <= MAX_GROWTH_S,
        wanted,
        f"adds {text} (p50)",
        {f"added_s {tokens}": seconds for tokens, seconds in added.items()},
    )


def _write_until_killed(values: Tensor, connection: Connection, lock: str, first: int) -> None:
    """Take the lock, queue writes for a second, say so, and go on."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    mine = values[first : first + _BLOCK_BYTES]
    for number in range(2_000_000):
        mine.fill_(1 + number % 100)
        if number == 1000:
            connection.send(fd)


def _kills(machine: Machine) -> Passed:
    """Each victim writes a block of its own. When it is dead and quiet, the block gets other
    values, which must stay."""
    at_once = machine.pick(10, 2)
    memory = _made(machine, at_once * _BLOCK_BYTES)
    blocks = memory.tensor().view(-1, _BLOCK_BYTES)
    quiet_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(machine.pick(10, 1)):
            victims = []
            for number in range(at_once):
                lock = f"{folder}/{turn}-{number}"
                first = number * _BLOCK_BYTES
                process, connection = _other(machine, memory, _write_until_killed, lock, first)
                victims.append((process, connection, lock))
            for number, (process, connection, lock) in enumerate(victims):
                connection.recv()
                quiet_s.append(_killed(memory, process, lock, machine))
                blocks[number] = 200
            machine.synchronize()
            time.sleep(machine.pick(0.05, 0.01))
            if changed := int((blocks != 200).sum()):
                raise Failed(f"{changed} bytes were written by processes that counted as quiet")
    memory.close()
    p50, most = median(quiet_s), max(quiet_s)
    return Passed(
        f"{len(quiet_s)} killed, no byte changed; from lock to quiet {p50 * 1e3:.1f} ms (p50), "
        f"{most * 1e3:.1f} ms (max)",
        {"kills": len(quiet_s), "quiet_s p50": p50, "quiet_s max": most},
    )


def _killed(memory: SharedMemory, process: BaseProcess, lock: str, machine: Machine) -> float:
    """Kill the process; returns the seconds from its dropped lock until it is quiet, as the block
    manager finds it: exited, and off the driver's list."""
    pid, listed = process.pid, AllProcesses()
    assert pid is not None
    uuid = kvops.cuda.driver(_device(machine)).uuid
    try:
        pids = listed.pids(uuid)
        if os.getpid() not in pids:
            raise Skipped(f"runs only where NVML lists this process on {uuid} (pid: host)")
        if pid not in pids:
            raise Failed(f"the driver does not list process {pid}, which uses {uuid}")
    except ProcessListError as error:
        raise Skipped(f"runs only where NVML lists processes: {error}") from error
    pidfd, fd = os.pidfd_open(pid), os.open(lock, os.O_RDWR)
    os.kill(pid, signal.SIGKILL)
    fcntl.flock(fd, fcntl.LOCK_EX)
    dropped = time.monotonic()
    os.close(fd)
    select.select([pidfd], [], [])
    while pid in listed.pids(uuid):
        if time.monotonic() - dropped > MAX_QUIET_S:
            raise Failed(f"the driver lists process {pid} {MAX_QUIET_S:g} s after its death")
        time.sleep(0.001)
    os.close(pidfd)
    process.join()
    return time.monotonic() - dropped


def peer_checks(machine: Machine) -> Iterator[Check]:
    yield "blocks copied from another GPU", lambda: _copied(machine)


def _copied(machine: Machine) -> Passed:
    """One GPU copies blocks of another one's arena, as a mover does between pools. A dry
    run has memory of the host in the place of both."""
    if not machine.dry_run and (count := torch.cuda.device_count()) < 2:
        raise Skipped(f"runs only with two GPUs; here is {count}")
    names = machine.pick(("cuda:0", "cuda:1"), ("memfd:0", "memfd:1"))
    num_blocks = machine.pick(512, 4)
    try:
        theirs, own = [kvops.cuda.driver(name) for name in names]
    except kvops.BackendUnavailable as error:
        raise Skipped(f"runs only with cuda-bindings: {error}") from error
    source, target = [
        SharedMemory.create(driver, num_blocks * _BLOCK_BYTES) for driver in (theirs, own)
    ]
    values = source.tensor().view(num_blocks, _BLOCK_BYTES)
    values.copy_(torch.arange(num_blocks, dtype=torch.uint8)[:, None].expand_as(values))
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    try:
        read = SharedMemory.open(own, os.dup(source.fd), source.num_bytes, writable=False)
    except DriverError as error:
        raise Skipped(f"runs only where GPUs reach each other: {error}") from error
    queue, began = own.copies(), time.perf_counter()
    order = torch.randperm(num_blocks).tolist()
    for place, block in enumerate(order):
        begins = target.pointer + place * _BLOCK_BYTES, read.pointer + block * _BLOCK_BYTES
        queue.copy(*begins, _BLOCK_BYTES)
    is_done = queue.mark()
    while not is_done():
        pass
    seconds = time.perf_counter() - began
    found = target.tensor().view(num_blocks, _BLOCK_BYTES).cpu()
    wanted = torch.tensor(order, dtype=torch.int64).to(torch.uint8)[:, None]
    if wrong := int((found != wanted).any(1).sum()):
        raise Failed(f"{wrong} of {num_blocks} blocks have other bytes")
    for memory in (read, source, target):
        memory.close()
    rate = num_blocks * _BLOCK_BYTES / seconds / 1e9
    return Passed(f"{num_blocks} blocks at {rate:.1f} GB/s", {"gb_per_s": rate})
