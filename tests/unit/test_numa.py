"""NUMA: the topology comes from a fake /sys, and memory policies go to a fake kernel."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.pool.arena import make_file
from services.runtime.numa.policy import _MBIND, _SET_MEMPOLICY, InterleavePolicy
from services.runtime.numa.topology import HostCpus, Node, format_cpus, parse_cpus

INTERLEAVE = 3


def fake_system(root: Path, nodes: dict[int, str], num_cores: int) -> Path:
    """Core i has the CPUs i and i + num_cores."""
    for number, cpus in nodes.items():
        (root / f"node/node{number}").mkdir(parents=True)
        (root / f"node/node{number}/cpulist").write_text(cpus + "\n")
    for cpu in range(2 * num_cores):
        (root / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        siblings = f"{cpu % num_cores},{cpu % num_cores + num_cores}\n"
        (root / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    return root


def test_nodes_and_cores_of_a_host_with_two_sockets(tmp_path: Path) -> None:
    system = fake_system(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, num_cores=8)
    host = HostCpus.read(range(16), system)
    assert host.nodes == (
        Node(0, (0, 1, 2, 3, 8, 9, 10, 11)),
        Node(1, (4, 5, 6, 7, 12, 13, 14, 15)),
    )
    assert host.cores == tuple((core, core + 8) for core in range(8))
    assert host.cpus == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)
    assert host.on([1]) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert host.as_one_node().nodes == (Node(0, tuple(range(16))),)


def test_only_usable_cpus_count(tmp_path: Path) -> None:
    """Node 1 has no usable CPU, and node 2 (memory alone) has no CPU."""
    system = fake_system(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, num_cores=8)
    host = HostCpus.read({1, 2, 9}, system)
    assert host == HostCpus((Node(0, (1, 2, 9)),), ((1, 9), (2,)))
    assert HostCpus.read(range(16), system).only([4, 12, 9]) == HostCpus(
        (Node(0, (9,)), Node(1, (4, 12))), ((9,), (4, 12))
    )


def test_without_a_topology_all_cpus_are_one_node_of_single_cores(tmp_path: Path) -> None:
    assert HostCpus.read({3, 5}, tmp_path) == HostCpus((Node(0, (3, 5)),), ((3,), (5,)))


def test_this_machine_has_a_topology() -> None:
    usable = os.sched_getaffinity(0)
    host = HostCpus.read(usable)
    assert sorted(host.cpus) == sorted(cpu for core in host.cores for cpu in core) == sorted(usable)


@pytest.mark.parametrize(("text", "cpus"), [("0", {0}), ("0-3,6", {0, 1, 2, 3, 6})])
def test_a_list_of_cpus_is_read_and_written(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(cpus) == text


class Kernel:
    """Records the calls, with the nodes of their masks; refuses them with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.asked: list[tuple[object, ...]] = []
        self._code = code

    def __call__(self, number: int, *arguments: object) -> int:
        plain = [a.value if isinstance(a, ctypes._SimpleCData) else a for a in arguments]
        self.asked.append((number, *(nodes_of(a) for a in plain)))
        return self._code


def nodes_of(argument: object) -> object:
    if not isinstance(argument, ctypes.Array):
        return argument
    return [bit for bit in range(64 * len(argument)) if argument[bit // 64] >> bit % 64 & 1]


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/quire-test-{os.getpid()}-numa")
    yield path
    path.unlink(missing_ok=True)


def test_an_arena_is_interleaved_whole_before_its_memory_is_allocated(path: Path) -> None:
    size = 3 * mmap.PAGESIZE + 5
    allocated: list[int] = []

    class Watching(Kernel):
        def __call__(self, number: int, *arguments: object) -> int:
            allocated.append(path.stat().st_blocks)
            return super().__call__(number, *arguments)

    kernel = Watching()
    make_file(path, size, InterleavePolicy((0, 70), kernel))
    ((number, address, length, mode, nodes, max_node, flags),) = kernel.asked
    assert (number, length, mode, nodes) == (_MBIND, size, INTERLEAVE, [0, 70])
    assert isinstance(address, int)
    assert address % mmap.PAGESIZE == 0
    assert isinstance(max_node, int)
    assert max_node > 70 + 1
    assert flags == 0
    assert allocated == [0]
    assert path.stat().st_blocks > 0


def test_weights_are_interleaved_while_they_are_loaded_and_nothing_after(path: Path) -> None:
    kernel = Kernel()
    with InterleavePolicy((0, 1), kernel).interleaved():
        assert [call[:3] for call in kernel.asked] == [(_SET_MEMPOLICY, INTERLEAVE, [0, 1])]
    assert kernel.asked[1] == (_SET_MEMPOLICY, 0, None, 0)


@pytest.mark.parametrize("nodes", [(), (1,)])
def test_memory_of_one_node_needs_no_call(path: Path, nodes: tuple[int, ...]) -> None:
    kernel = Kernel()
    policy = InterleavePolicy(nodes, kernel)
    make_file(path, 100, policy)
    with policy.interleaved():
        pass
    assert kernel.asked == []


def test_a_refusal_is_logged_once_with_its_reason_and_nothing_is_asked_again(path: Path) -> None:
    kernel = Kernel(errno.EPERM)
    policy = InterleavePolicy((0, 1), kernel)
    with capture_logs() as logs:
        make_file(path, 100, policy)
        with policy.interleaved():
            pass
    assert path.stat().st_size == 100
    assert len(kernel.asked) == 1
    (line,) = logs
    assert (line["event"], line["call"]) == ("memory_not_interleaved", "mbind")
    assert line["reason"] == "Operation not permitted"


def test_this_kernel_takes_the_calls_or_refuses_them(path: Path) -> None:
    """Node 1 may be missing: the kernel interleaves over the existing nodes."""
    with capture_logs() as logs:
        make_file(path, 2 * mmap.PAGESIZE, InterleavePolicy((0, 1)))
        with InterleavePolicy((0, 1)).interleaved():
            pass
    assert {line["event"] for line in logs} <= {"memory_not_interleaved"}
    assert all(line["reason"] != os.strerror(errno.EINVAL) for line in logs)
