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
    """A readable and exact text: "1.50 GiB (1610612736 bytes)"."""
    for unit, size in _UNITS.items():
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit} ({num_bytes} bytes)"
    return f"{num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a pool and the host's workers need.

    `pool_bytes`: the size that the user has set; None: by measurement. `num_expected_workers`: all
    workers of the host, with this one. `weight_bytes`: the weights that each of the other workers
    will still load. `activation_bytes`: the peak of each worker, this one included, beyond its
    weights. `arena`: the NUMA nodes of a new pool's arena.
    """

    pool_bytes: int | None
    num_expected_workers: int = 1
    weight_bytes: int = 0
    activation_bytes: int = 0
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
    """The number of blocks that fit. `bytes_per_block`: of a block, and of its stamp if that takes
    memory of the same kind. `where` the memory is: for errors.

    StartupError, with the numbers: the set size is not available, or fewer than MIN_BLOCKS fit.
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
