"""The commands of rank 0 to the other ranks, and their answers, over one ordered connection for
each rank, which executes commands in their order.

A connection is a pair of Unix sockets. It needs no port, carries descriptors of locks, and closes
when the process at its other end has ended, however that ended.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.checkpoint.adapter import AdapterFiles
from services.common.pool.layout import PoolLayout
from services.engine.device.steps import StepFacts

_DTYPES = {
    **dict.fromkeys(("token_ids", "positions", "slot_mapping", "wanted"), torch.int64),
    **dict.fromkeys(("block_tables", "cu_query_lens", "context_lens", "page_ids"), torch.int32),
}
"""The tensors of a step, in the order of their bytes: int64 first, so that all are aligned."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load the shard of rank `rank`; the answer is its GPU's UUID. `device`: as in the settings.
    `meeting`: see `collectives.connect`. `isa`: of the CPU's kernels, None with another backend.
    `context`: see `ModelConfig.for_context`. `block_size`, `kv_dtype`: of the pool. `keeper`: the
    directory of the keeper of shared weights; None: they are not shared. `measures`: whether their
    memory is measured."""

    model: Path
    dtype: torch.dtype
    backend: str
    isa: str | None
    device: str
    num_threads: int
    rank: int
    size: int
    meeting: Path
    timeout_s: float
    context: int | None
    block_size: int
    kv_dtype: torch.dtype
    keeper: Path | None = None
    measures: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect with the other ranks; all have loaded their shards."""


@dataclass(frozen=True, slots=True)
class BeginMeasuring:
    """Measure the memory of the steps that follow, which write nothing. `layout`: of the pool."""

    layout: PoolLayout


@dataclass(frozen=True, slots=True)
class EndMeasuring:
    """Answer with the `GpuMemoryPlan` of this rank's GPU."""

    num_workers: int
    utilization: float


@dataclass(frozen=True, slots=True)
class MakeMemory:
    """Allocate memory on the rank's GPU; its descriptor follows the answer."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankArena:
    """A rank's arena of one pool. `path`: its file; None: it is on the rank's GPU, and its
    descriptor follows. `gone`: a file that the rank makes if its GPU is lost."""

    path: Path | None
    num_bytes: int
    layout: PoolLayout
    num_blocks: int
    gone: Path


@dataclass(frozen=True, slots=True)
class Join:
    """Map the arenas: of the worker's own pool first, then of its swap pool if it has one. For each
    pool the descriptor of the worker's lock follows, and that of memory on a GPU."""

    arenas: tuple[RankArena, ...]
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Unmap the arenas and close the locks."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Record decode steps as graphs, see `ModelSteps.capture`: all ranks do so together."""

    max_rows: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load the rank's part of an adapter, which steps call `number`. `gone`: the numbers of
    adapters that no later step has."""

    number: int
    files: AdapterFiles
    gone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a step. Its tensors follow as one broadcast; `shapes` are theirs. An adapter in
    `facts` is a number."""

    shapes: dict[str, tuple[int, ...]]
    facts: StepFacts


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute logits: of the last step's final states, or of `num_states` others, which follow as
    one broadcast."""

    num_states: int | None = None


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy blocks of the worker's own pool."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SwapBlocks:
    """Copy blocks to the swap pool, or back."""

    out: bool
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a message that is asked. `failure`: why the rank could not; empty: it did.
    `has_descriptor`: whether one follows."""

    failure: str = ""
    value: Any = None
    has_descriptor: bool = False


Setting = Load | Connect | BeginMeasuring | EndMeasuring | MakeMemory | Join | Capture | Leave
Message = Setting | LoadAdapter | Forward | Logits | CopyBlocks | SwapBlocks


def encoded(message: Message) -> bytes:
    return bytes(ForkingPickler.dumps(message))


def send(connection: Connection, message: Message | Done) -> None:
    connection.send(message)


def packed(placed: Mapping[str, Tensor], facts: StepFacts) -> tuple[Forward, Tensor]:
    """The message of a step, and the bytes that follow it, on the device: the host does not wait
    for tokens that only the device knows."""
    tensors = {name: placed[name] for name in _DTYPES if name in placed}
    octets = [
        tensor.to(_DTYPES[name]).contiguous().view(-1).view(torch.uint8)
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Forward(shapes, facts), torch.cat(octets)


def unpacked(message: Forward, octets: Tensor) -> dict[str, Tensor]:
    """The tensors of a step."""
    found, begin = {}, 0
    for name, shape in message.shapes.items():
        end = begin + math.prod(shape) * _DTYPES[name].itemsize
        found[name] = octets[begin:end].view(_DTYPES[name]).view(shape)
        begin = end
    return found


def num_octets(message: Forward) -> int:
    return sum(math.prod(shape) * _DTYPES[name].itemsize for name, shape in message.shapes.items())
