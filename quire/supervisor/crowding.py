"""How many workers a host can have: workers on CPUs divide them, and more workers than CPUs only
take turns."""

import os

WORKERS_PER_CPU = 8
"""The most workers for each CPU. Each takes hundreds of MB of its own."""


def crowding(num_workers: int, *, is_on_gpu: bool, num_cpus: int | None = None) -> str:
    """Return a warning if the workers have less than a CPU each, otherwise nothing. Raises
    ValueError if there would be more than `WORKERS_PER_CPU` of them for each CPU. `num_cpus` is
    None for the CPUs of this process."""
    num_cpus = num_cpus or len(os.sched_getaffinity(0))
    if is_on_gpu or num_workers <= num_cpus:
        return ""
    text = f"{num_workers} workers on {num_cpus} CPUs"
    if num_workers > WORKERS_PER_CPU * num_cpus:
        raise ValueError(
            f"{text} are too many: at most {WORKERS_PER_CPU} for each CPU, which are "
            f"{WORKERS_PER_CPU * num_cpus} here"
        )
    return f"{text} take turns, so that each is slower"
