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
from services.common.board import SEAT_WORDS, Seat

_PROMPTS_WEIGHT = 0.5
"""A prompt counts as much as so many streams: 4 that decode beside one prompt keep 8/9 of their
CPUs' time, one beside 8 keeps a fifth."""


def lanes(cpus: Sequence[int], seats: Sequence[Seat], own: Seat) -> tuple[Lane, ...]:
    """The lanes of `own`: first its home, then what it may borrow. `seats`: all workers of the
    host, `own` among them, which all compute the same division from them."""
    homes = divide(cpus, seats)
    mine = [Lane(cpu) for cpu in homes[own]]
    lent = []
    for turn, cpu in enumerate(cpus):
        if cpu in homes[own]:
            continue
        owners = [seat for seat in seats if cpu in homes[seat]]
        others = [seat for seat in seats if seat not in owners]
        # Everybody is first in line for some CPU.
        start = turn % len(others)
        line = [*others[start:], *others[:start]]
        before = [*owners, *line[: line.index(own)]]
        lent.append(Lane(cpu, tuple(seat.index * SEAT_WORDS for seat in before)))
    return (*mine, *lent)


def pause_s(step_s: float, num_decoding: int, num_prompts: float, limit_s: float) -> float:
    """How long decoding leaves its CPUs to prompts after a step of `step_s`, so that from one token
    to the next it takes no longer than `limit_s`, if the step allows."""
    wanted_s = step_s * _PROMPTS_WEIGHT * num_prompts / num_decoding
    return max(0.0, min(wanted_s, limit_s - step_s))


def divide(cpus: Sequence[int], seats: Sequence[Seat]) -> Mapping[Seat, tuple[int, ...]]:
    """Each worker's home CPUs, at least one."""
    decode = [seat for seat in seats if seat.role == "decode"]
    prefill = [seat for seat in seats if seat.role != "decode"]
    half = len(cpus) // 2
    if not decode or not prefill or not half:
        return _shared_out(cpus, decode) | _shared_out(cpus, prefill)
    return _shared_out(cpus[:half], decode) | _shared_out(cpus[half:], prefill)


def _shared_out(cpus: Sequence[int], seats: Sequence[Seat]) -> dict[Seat, tuple[int, ...]]:
    num_seats, num_cpus = len(seats), len(cpus)
    if num_seats > num_cpus:
        return {seat: (cpus[i % num_cpus],) for i, seat in enumerate(seats)}
    return {
        seat: tuple(cpus[i * num_cpus // num_seats : (i + 1) * num_cpus // num_seats])
        for i, seat in enumerate(seats)
    }
