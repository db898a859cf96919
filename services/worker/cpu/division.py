"""Computes how a host's CPUs are divided among its workers.

Memory bandwidth bounds decode and arithmetic bounds prefill, so neither slows the other down if
each has CPUs of its own. Half of the CPUs are home to the decode workers and half to the prefill
workers; all are home to one role if there is no other. Within its half each worker has an equal
part, or shares a CPU if there are more workers than CPUs. A CPU whose home workers are idle is lent
to one other worker at a time.

While a stream runs, decode is never idle, and prompts would have only their half. So decode pauses
between steps: the more prompts wait for each running stream, the longer, up to a limit.

See ADR 45.
"""

from collections.abc import Mapping, Sequence

from kvops.native import Lane
from services.worker.cpu.board import ENTRY_WORDS, CpuBoardEntry

_PROMPTS_WEIGHT = 0.5
"""A prompt counts like this many streams. Four streams beside one prompt keep 8/9 of the time of
their CPUs, one stream beside eight prompts keeps a fifth."""


def lanes(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry], own: CpuBoardEntry
) -> tuple[Lane, ...]:
    """The lanes of `own`: first those on its home CPUs, then lent ones on all others.

    `entries`: of all workers of the host; each worker computes the same division from them.
    """
    homes = divide(cpus, entries)
    own_lanes = [Lane(cpu) for cpu in homes[own]]
    lent = []
    for turn, cpu in enumerate(cpus):
        if cpu in homes[own]:
            continue
        owners = [entry for entry in entries if cpu in homes[entry]]
        others = [entry for entry in entries if entry not in owners]
        # The order of the borrowers begins with another worker for each CPU.
        start = turn % len(others)
        queue = [*others[start:], *others[:start]]
        before = [*owners, *queue[: queue.index(own)]]
        lent.append(Lane(cpu, tuple(entry.index * ENTRY_WORDS for entry in before)))
    return (*own_lanes, *lent)


def pause_s(step_s: float, num_decoding: int, num_prompts: float, limit_s: float) -> float:
    """How long decode leaves its CPUs to prompts after a step that took `step_s`. Step and pause
    together take at most `limit_s`, unless the step alone takes longer."""
    wanted_s = step_s * _PROMPTS_WEIGHT * num_prompts / num_decoding
    return max(0.0, min(wanted_s, limit_s - step_s))


def divide(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry]
) -> Mapping[CpuBoardEntry, tuple[int, ...]]:
    """The home CPUs of each worker, at least one."""
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
