"""Computes the number of a pool's blocks, from `--pool-memory` or from half of the free memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.pool.memory import available_bytes
from services.runtime.errors import StartupError

if TYPE_CHECKING:  # bench.gpu computes without its imports
    from services.runtime.numa.policy import InterleavePolicy

MIN_BLOCKS = 4
"""A smaller pool cannot run two short sequences."""

_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def format_size(num_bytes: int) -> str:
    """Return a readable and exact text: "1.50 GiB (1610612736 bytes)"."""
    for unit, size in _UNITS.items():
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a pool and the host's workers need."""

    pool_bytes: int | None
    """The size that the user has set; None takes half of the free memory."""
    num_expected_workers: int = 1
    """The workers of the host, with this one."""
    weight_bytes: int = 0
    """The weights that each of the other workers will still load."""
    activation_bytes: int = 0
    """The peak of each worker beyond its weights."""
    arena: InterleavePolicy | None = field(default=None, compare=False)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the host's workers will still take, once this worker has its weights."""
        num_to_come = self.num_expected_workers - 1
        return num_to_come * self.weight_bytes + self.num_expected_workers * self.activation_bytes


def check_capacity(asked_bytes: int, root: Path) -> None:
    """Raises StartupError, with the numbers, if pools of `asked_bytes` do not fit under `root` even
    when `root` is empty."""
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


def num_blocks_for(
    plan: MemoryPlan, bytes_per_block: int, available: int, where: str = "this host"
) -> int:
    """Return the number of blocks that fit. `bytes_per_block` includes the stamp of a block if it
    takes memory of the same kind. `where` names the place of the memory in errors.

    Raises StartupError if the set size is not available, or if fewer than MIN_BLOCKS fit.
    """
    if plan.pool_bytes is not None and plan.pool_bytes > available:
        raise StartupError(
            f"pool memory {format_size(plan.pool_bytes)} is not available: "
            f"{where} has {format_size(available)} left for it"
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
