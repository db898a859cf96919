"""Ranks without a worker: a runner of several processes with an arena each, driven like
`models_oracle.RecordingRunner`."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import kvops
from kvops.native import Lane
from services.engine.pool import DTYPES, FileArena, KVPool
from services.engine.ranks.rank import ShardPlan
from services.engine.runner import Runner
from services.engine.weights.placement import SharedWeights
from services.pool.directory import PoolDirectory
from services.pool.header import PoolHeader
from services.pool.layout import KVDtype, PoolLayout
from services.pool.locks import WorkerLock
from services.worker.membership import Membership
from services.worker.ranks.processes import Ranks

from .models_oracle import RecordingRunner

LIMIT_S = 60.0


def pool_of(directory: Path, layout: PoolLayout, num_blocks: int, worker_id: str) -> Membership:
    """A pool without a store, full of NaN, or of random bytes in int8: arenas and a lock."""
    there = PoolDirectory(directory)
    if not there.workers.exists():
        there.workers.mkdir(parents=True)
        num_bytes = num_blocks * layout.block_bytes
        for rank in range(layout.tensor_parallel_size):
            there.arena(rank).write_bytes(b"\xff" * num_bytes)
    lock = WorkerLock.create(there.lock_path(worker_id))
    header = PoolHeader("pool", "run", layout, num_blocks, 0)
    arena = FileArena(there.kv, num_blocks * layout.block_bytes)
    pool = KVPool(arena, layout, num_blocks)
    nothing: Any = None
    return Membership(nothing, header, worker_id, pool, nothing, there, lock)


class RankedRunner(RecordingRunner):
    """A runner whose `ranks` may have served another runner before."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        ranks: Ranks,
        block_size: int = 4,
        num_blocks: int = 400,
        dtype: torch.dtype = torch.float32,
        *,
        kv_dtype: KVDtype | None = None,
        devices: Sequence[str] | None = None,
        shared: SharedWeights | None = None,
        join: Callable[[PoolLayout], Membership] | None = None,
        ops: kvops.Backend | None = None,
        sums_in_order: bool = True,
    ) -> None:
        """`join`: joins the worker's pool, for other memory than files. `ops`: None: the CPU's."""
        self.ops = ops or kvops.backend("cpu")
        if self.ops.native is not None:
            self.ops.native.assign([Lane()])
        plan = ShardPlan(
            checkpoint,
            dtype,
            self.ops.name,
            isa=self.ops.native.isa if self.ops.native else None,
            devices=devices or ["cpu"] * ranks.size,
            num_threads=1,
            timeout_s=LIMIT_S,
            context=None,
            block_size=block_size,
            kv_dtype=DTYPES[kv_dtype] if kv_dtype else dtype,
            sums_in_order=sums_in_order,
            keeper=directory if shared else None,
        )
        self.ranks = ranks
        self.model: Any = ranks.load(plan, self.ops, shared)
        config = self.model.config
        names: dict[torch.dtype, KVDtype] = {dtype: name for name, dtype in DTYPES.items()}
        self.layout = PoolLayout(
            model="model",
            fingerprint="any",
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kv_dtype or names[dtype],
            block_size=block_size,
            tensor_parallel_size=ranks.size,
        )
        if join is None:
            self.membership = pool_of(directory / "pool", self.layout, num_blocks, "worker")
        else:
            self.membership = join(self.layout)
        name = "worker" if join is None else self.membership.worker_id
        self.colder = pool_of(directory / ".colder", self.layout, num_blocks, name)
        ranks.join([self.membership, self.colder], max_num_seqs=8)
        self.arena = self.membership.pool.kv
        self.block_size = block_size
        self.free = random.Random(num_blocks).sample(range(num_blocks), num_blocks)
        self.steps = ranks.steps(self.model, self.arena, block_size, self.ops)
        Runner.__init__(self, self.model, self.arena, block_size, self.ops, self.steps)
