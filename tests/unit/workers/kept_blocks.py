"""Fake KV whose blocks are bytes, so that files can have them."""

from collections.abc import Iterator, MutableMapping
from pathlib import Path

import numpy as np
import torch

from services.runtime.metrics import WorkerMetrics
from services.worker.file_cache.block_files import BlockFiles
from services.worker.file_cache.file_cache import FileCache
from services.worker.file_cache.pool_blocks import HostBlocks

from .fake_pools import FakePools

FINGERPRINT = "f" * 32
BUDGET = 1 << 20


class SlotBytes(MutableMapping[int, tuple[int, int]]):
    """`Arena.slots` in one array. A slot without a token has position -1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.values_of = np.full((num_blocks * block_size, 2), -1, np.int64)
        self.blocks = HostBlocks(torch.from_numpy(self.values_of).view(num_blocks, -1))

    def __getitem__(self, slot: int) -> tuple[int, int]:
        position, token = map(int, self.values_of[slot])
        if position < 0:
            raise KeyError(slot)
        return position, token

    def __setitem__(self, slot: int, value: tuple[int, int]) -> None:
        self.values_of[slot] = value

    def __delitem__(self, slot: int) -> None:
        self.values_of[slot] = -1

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.values_of[:, 0] >= 0).tolist())

    def __len__(self) -> int:
        return len(list(iter(self)))


def file_cache(cache: Path, pools: FakePools, metrics: WorkerMetrics, worker_id: str) -> FileCache:
    """The blocks in files of a worker on these pools, whose KV becomes bytes."""
    arena, spec = pools.arena, pools.spec
    if not isinstance(arena.slots, SlotBytes):
        arena.slots = SlotBytes(spec.num_blocks, spec.block_size)
    files, blocks = BlockFiles(cache, FINGERPRINT, worker_id, BUDGET, 2), arena.slots.blocks
    return FileCache(files, arena.stamps, lambda: blocks, metrics, compares_costs=False)


def kept(cache: Path) -> list[Path]:
    """The files of blocks, in no order."""
    return [path for path in cache.glob("*/*") if len(path.name) == 32]
