"""How a host's CPUs are divided among its workers.

Decoding is bound by memory and prefill by arithmetic, so that side by side, each on CPUs of its
own, neither slows the other down. Half of the CPUs are home to the decode workers and half to the
prefill workers (all to the one role when there is no other); within its half, each worker has its
equal part, or shares one where there are more workers than CPUs. A CPU whose home workers are idle
is lent to one of the others at a time.

Decoding is never idle while a stream runs, so that prompts would have their half and no more. It
pauses between steps, then: the more prompts wait for each stream that decodes, the longer, up to a
limit.

See ADR 45.
"""

from collections.abc import Mapping, Sequence

from kvops.native import Lane
from services.worker.cpu.board import SEAT_WORDS, CpuBoardEntry

_PROMPTS_WEIGHT = 0.5
"""A prompt counts as much as so many streams: 4 that decode beside one prompt keep 8/9 of their
CPUs' time, one beside 8 keeps a fifth."""


def lanes(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry], own: CpuBoardEntry
) -> tuple[Lane, ...]:
    """The lanes of `own`: first its home, then what it may borrow. `entries`: all workers of the
    host, `own` among them, which all compute the same division from them."""
    homes = divide(cpus, entries)
    mine = [Lane(cpu) for cpu in homes[own]]
    lent = []
    for turn, cpu in enumerate(cpus):
        if cpu in homes[own]:
            continue
        owners = [entry for entry in entries if cpu in homes[entry]]
        others = [entry for entry in entries if entry not in owners]
        # Everybody is first in line for some CPU.
        start = turn % len(others)
        line = [*others[start:], *others[:start]]
        before = [*owners, *line[: line.index(own)]]
        lent.append(Lane(cpu, tuple(entry.index * SEAT_WORDS for entry in before)))
    return (*mine, *lent)


def pause_s(step_s: float, num_decoding: int, num_prompts: float, limit_s: float) -> float:
    """How long decoding leaves its CPUs to prompts after a step of `step_s`, so that from one token
    to the next it takes no longer than `limit_s`, if the step allows."""
    wanted_s = step_s * _PROMPTS_WEIGHT * num_prompts / num_decoding
    return max(0.0, min(wanted_s, limit_s - step_s))


def divide(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry]
) -> Mapping[CpuBoardEntry, tuple[int, ...]]:
    """Each worker's home CPUs, at least one."""
    decode = [entry for entry in entries if entry.role == "decode"]
    prefill = [entry for entry in entries if entry.role != "decode"]
    half = len(cpus) // 2
    if not decode or not prefill or not half:
        return _shared_out(cpus, decode) | _shared_out(cpus, prefill)
    return _shared_out(cpus[:half], decode) | _shared_out(cpus[half:], prefill)


def _shared_out(
    cpus: Sequence[int], entries: Sequence[CpuBoardEntry]
) -> dict[CpuBoardEntry, tuple[int, ...]]:
    num_entries, num_cpus = len(entries), len(cpus)
    if num_entries > num_cpus:
        return {entry: (cpus[i % num_cpus],) for i, entry in enumerate(entries)}
    return {
        entry: tuple(cpus[i * num_cpus // num_entries : (i + 1) * num_cpus // num_entries])
        for i, entry in enumerate(entries)
    }
