"""How many blocks a pool gets: what `--pool-memory` says, or half of the memory that is left."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import StartupError
from services.common.pool.memory import available_bytes

MIN_BLOCKS = 4
"""A pool below this cannot run two short sequences."""

_UNITS = {
    **{"": 1, "B": 1},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


def parse_size(text: str) -> int:
    """Bytes: "2GiB", "1.5 GB", "4096". ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{text!r} is not a size: a number and one of {units}")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(num_bytes: int) -> str:
    """ "1.50 GiB (1610612736 bytes)": readable, and exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.2f} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who needs memory beside the pool.

    `pool_bytes`: what the user gave the pool, None to measure. `worker_bytes`: what each worker
    that is still to come will take for itself (weights that it does not share, activations);
    `activation_bytes`: what each worker, this one too, takes at its peak beyond its weights.
    """

    pool_bytes: int | None
    num_expected_workers: int = 1
    weight_bytes: int = 0
    activation_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """What this host's workers will still take, once the asking one has its weights."""
        num_to_come = self.num_expected_workers - 1
        return num_to_come * self.weight_bytes + self.num_expected_workers * self.activation_bytes


def check_capacity(asked_bytes: int, root: Path) -> None:
    """Whether pools of so many bytes could be under `root` if there were no others. StartupError,
    with the numbers."""
    try:
        disk = os.statvfs(root)
    except OSError as error:
        raise StartupError(f"{root}, where pools are to be: {error.strerror}") from error
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    if asked_bytes > (capacity := available_bytes(root) + used):
        raise StartupError(
            f"pool memory and swap memory are {format_size(asked_bytes)} together: "
            f"{root} can hold {format_size(capacity)} on this host"
        )


def num_blocks_for(plan: MemoryPlan, bytes_per_block: int, available: int) -> int:
    """Blocks that fit, each with its stamp. StartupError, with the numbers: the given memory is
    not there, or holds fewer than MIN_BLOCKS."""
    if plan.pool_bytes is not None and plan.pool_bytes > available:
        raise StartupError(
            f"pool memory {format_size(plan.pool_bytes)} is not available: "
            f"this host has {format_size(available)} left for it"
        )
    budget = plan.pool_bytes
    if budget is None:
        budget = max(0, available - plan.reserved_bytes) // 2
    num_blocks = budget // bytes_per_block
    if num_blocks < MIN_BLOCKS:
        raise StartupError(
            f"the KV pool needs at least {MIN_BLOCKS} blocks of {format_size(bytes_per_block)}, "
            f"but gets {format_size(budget)}: {format_size(available)} are available, of which "
            f"{format_size(plan.reserved_bytes)} are for {plan.num_expected_workers} workers"
        )
    return num_blocks
