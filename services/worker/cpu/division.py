"""Computes how a host's CPUs are divided among its workers.

Memory bandwidth bounds decode and arithmetic bounds prefill, so neither slows the other down if
each has CPUs of its own. Half of the CPUs are home to the decode workers and half to the prefill
workers; all are home to one role if there is no other. Within its half each worker has an equal
part, or shares a CPU if there are more workers than CPUs. A CPU whose home workers are idle is lent
to one other worker at a time.

On a host with several NUMA nodes a worker chooses a domain, one node or several, at its start, and
keeps it: its memory is there. The rule above then divides each domain. Decode borrows only CPUs of
its domain, because it waits for memory that its own CPUs keep busy; prefill borrows all.

While a stream runs, decode is never idle, and prompts would have only their half. So decode pauses
between steps while a prompt waits.

See ADR 45.
"""

from collections.abc import Mapping, Sequence

from kvops.native import Lane
from services.runtime.numa.topology import HostCpus
from services.worker.cpu.board import ENTRY_WORDS, CpuBoardEntry

_GAP_STEPS, _GAP_S = 2.0, 0.1
"""The gap between tokens while prompts wait: two steps, so that prompts have half of the time of
decode's CPUs, and at most 0.1 s, which nearly doubles the good requests of slower models."""


def lane_cpus(host: HostCpus, num_workers: int) -> HostCpus:
    """The first CPU of each core: its hyperthreads share the units that compute and the path to
    memory. All CPUs if there are more workers than cores, so that fewer workers share a CPU."""
    if num_workers > len(host.cores):
        return host
    return host.only([core[0] for core in host.cores])


def domains(host: HostCpus, num_workers: int) -> tuple[tuple[int, ...], ...]:
    """The groups of neighbouring nodes from which workers choose: as many equal groups as there are
    nodes, but at most as many as workers. One group if a node has less than half of another's CPUs,
    because halves of such nodes would not be halves of the host."""
    sizes = [len(node.cpus) for node in host.nodes]
    num_nodes = len(sizes)
    if 2 * min(sizes) < max(sizes):
        return (host.node_ids,)
    size = next(
        size
        for size in range(1, num_nodes + 1)
        if num_nodes % size == 0 and num_nodes // size <= num_workers
    )
    return tuple(host.node_ids[i : i + size] for i in range(0, num_nodes, size))


def choose_domain(
    role: str, choices: Sequence[tuple[int, ...]], entries: Sequence[CpuBoardEntry]
) -> tuple[int, ...]:
    """The domain with the fewest workers of this role, then of all roles. Of equals decode takes
    the first and prefill the last, so that one worker of each role are in two domains."""

    def crowd(nodes: tuple[int, ...]) -> tuple[int, int]:
        present = [entry.role for entry in entries if set(nodes).intersection(entry.nodes)]
        return present.count(role), len(present)

    return min(choices if role == "decode" else choices[::-1], key=crowd)


def lanes(host: HostCpus, entries: Sequence[CpuBoardEntry], own: CpuBoardEntry) -> tuple[Lane, ...]:
    """The lanes of `own`: first those on its home CPUs, then lent ones, node by node.

    `entries` are of all workers of the host; each worker computes the same division from them.
    """
    homes = divide(host, entries)
    nodes = {cpu: node.id for node in host.nodes for cpu in node.cpus}
    lent = []
    for turn, cpu in enumerate(host.cpus):
        owners = [entry for entry in entries if cpu in homes[entry]]
        others = [e for e in entries if e not in owners and _may_borrow(e, nodes[cpu])]
        if own not in others:
            continue
        # The order of the borrowers begins with another worker for each CPU.
        start = turn % len(others)
        queue = [*others[start:], *others[:start]]
        before = [*owners, *queue[: queue.index(own)]]
        lent.append(Lane(cpu, tuple(entry.index * ENTRY_WORDS for entry in before)))
    return (*(Lane(cpu) for cpu in homes[own]), *lent)


def _may_borrow(entry: CpuBoardEntry, node_id: int) -> bool:
    return entry.role != "decode" or node_id in entry.nodes


def pause_s(step_s: float, max_gap_s: float | None) -> float:
    """The time for which decode leaves its CPUs to prompts after a step of `step_s`. None for
    `max_gap_s` means the usual gap. Not positive if the step fills the gap."""
    gap_s = min(_GAP_STEPS * step_s, _GAP_S) if max_gap_s is None else max_gap_s
    return gap_s - step_s


def divide(
    host: HostCpus, entries: Sequence[CpuBoardEntry]
) -> Mapping[CpuBoardEntry, tuple[int, ...]]:
    """The home CPUs of each worker, at least one."""
    homes: dict[CpuBoardEntry, tuple[int, ...]] = {}
    for nodes in {entry.nodes for entry in entries}:
        members = [entry for entry in entries if entry.nodes == nodes]
        homes |= _divide_domain(host.on(nodes) or host.cpus, members)
    return homes


def _divide_domain(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry]
) -> dict[CpuBoardEntry, tuple[int, ...]]:
    decode = [entry for entry in entries if entry.role == "decode"]
    prefill = [entry for entry in entries if entry.role != "decode"]
    half = len(cpus) // 2
    if not decode or not prefill or not half:
        return _split_evenly(cpus, decode) | _split_evenly(cpus, prefill)
    return _split_evenly(cpus[:half], decode) | _split_evenly(cpus[half:], prefill)


def _split_evenly(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry]
) -> dict[CpuBoardEntry, tuple[int, ...]]:
    num_entries, num_cpus = len(entries), len(cpus)
    if num_entries > num_cpus:
        return {entry: (cpus[i % num_cpus],) for i, entry in enumerate(entries)}
    return {
        entry: tuple(cpus[i * num_cpus // num_entries : (i + 1) * num_cpus // num_entries])
        for i, entry in enumerate(entries)
    }
