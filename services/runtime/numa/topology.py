"""Reads which CPUs of this host share a core, and which share a NUMA node, from /sys."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node with its CPUs, sorted."""

    id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostCpus:
    """CPUs of a host."""

    nodes: tuple[Node, ...]
    """The nodes with such CPUs, sorted by id."""
    cores: tuple[tuple[int, ...], ...]
    """The CPUs of each core (hyperthreads), sorted."""

    @classmethod
    def read(cls, usable: Collection[int], system: Path = _SYSTEM) -> Self:
        """`usable` are the CPUs that the process may use. If /sys does not place them all, as on a
        kernel without NUMA, they are one node; a CPU without listed siblings is a core."""
        found = {
            int(path.name.removeprefix("node")): _read_cpus(path / "cpulist")
            for path in system.glob("node/node[0-9]*")
        }
        if not set().union(*found.values()) >= set(usable):
            found = {0: set(usable)}
        nodes = [Node(number, _common(cpus, usable)) for number, cpus in sorted(found.items())]
        cores = {
            _common(_read_cpus(system / f"cpu/cpu{cpu}/topology/thread_siblings_list"), usable)
            or (cpu,)
            for cpu in usable
        }
        return cls(tuple(node for node in nodes if node.cpus), tuple(sorted(cores)))

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs, node by node."""
        return tuple(cpu for node in self.nodes for cpu in node.cpus)

    @property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.nodes)

    def on(self, node_ids: Collection[int]) -> tuple[int, ...]:
        """The CPUs of these nodes, node by node."""
        return tuple(cpu for node in self.nodes if node.id in node_ids for cpu in node.cpus)

    def only(self, cpus: Collection[int]) -> "HostCpus":
        """The host with these of its CPUs."""
        nodes = [Node(node.id, _common(node.cpus, cpus)) for node in self.nodes]
        cores = [_common(core, cpus) for core in self.cores]
        return HostCpus(
            tuple(node for node in nodes if node.cpus), tuple(core for core in cores if core)
        )

    def as_one_node(self) -> "HostCpus":
        return HostCpus((Node(0, tuple(sorted(self.cpus))),), self.cores)


def parse_cpus(text: str) -> set[int]:
    """ "0-3,6" -> 0, 1, 2, 3, 6. Raises ValueError."""
    ranges = [[int(end) for end in part.split("-", 1)] for part in text.split(",")]
    return {cpu for ends in ranges for cpu in range(ends[0], ends[-1] + 1)}


def format_cpus(cpus: Iterable[int]) -> str:
    """0, 1, 2, 3, 6 -> "0-3,6"."""
    ordered = sorted(cpus)
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    runs = [ordered[a:b] for a, b in pairwise([0, *breaks, len(ordered)]) if a < b]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _common(cpus: Iterable[int], others: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(set(cpus).intersection(others)))


def _read_cpus(path: Path) -> set[int]:
    """The CPUs that the file lists; none if there is no such file."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return parse_cpus(text) if text else set()
