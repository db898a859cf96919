"""One rank of a worker, and the methods that all ranks execute together.

Every rank executes the same methods in the same order. Rank 0 decides which: it calls the other
ranks (`services.engine.ranks.calls`) before it does the same. Only rank 0 stamps and reports.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

import kvops
from kvops import Backend
from kvops.cuda.vmm import DriverError
from kvops.native import Lane
from services.engine.device.graphs import Graph
from services.engine.device.opening import OpenDevice, lost_device, open_device
from services.engine.device.steps import ModelSteps, attention_shape
from services.engine.models.decoder import ComposedModel, LowRanks
from services.engine.models.load import load_shard
from services.engine.pool import Arena, CudaArena, FileArena, KVPool
from services.engine.ranks.calls import Call, Descriptor, RankAnswer
from services.engine.ranks.collectives import connect
from services.engine.ranks.step_call import StepCall
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import SharedWeights
from services.model.checkpoint.adapter import AdapterFiles
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.shards import Shard
from services.model.config.quantization import Quantization
from services.pool.directory import PoolDirectory
from services.pool.header import PoolHeader
from services.pool.keeper import close_all
from services.pool.layout import PoolLayout
from services.runtime.errors import StartupError

_FAILURES = (
    *(StartupError, kvops.BackendUnavailable, DriverError),
    *(RuntimeError, OSError, ValueError, SafetensorError),
)
_MAY_FAIL = ("load", "connect", "measure", "make_memory", "join", "load_adapter")
"""The methods whose errors rank 0 reports, with the rank. Any other error ends the rank, and so the
worker: other ranks may wait for it in an exchange."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The model and the settings that the ranks load."""

    model: Path
    dtype: torch.dtype
    backend: str
    isa: str | None
    """The instruction set of the CPU's kernels; None with another backend."""
    devices: Sequence[str]
    """The device of each rank, as in the settings."""
    num_threads: int
    timeout_s: float
    """An exchange that a rank does not join for so long fails, which ends the worker."""
    context: int | None
    """See `ModelConfig.for_context`."""
    block_size: int
    kv_dtype: torch.dtype
    sums_in_order: bool = True
    """Whether sums add up in the order of the ranks, so that a sequence has the same bits in any
    batch; see `collectives`."""
    quantize: Quantization | None = None
    dequantize: bool = False
    keeper: Path | None = None
    """The directory of the keeper that shares the weights on GPUs; None if they are not shared."""
    meeting: Path = Path()
    """See `collectives.connect`."""


class Rank:
    """One rank: its shard of the model, and its parts of the worker's pools.

    `new_graph` is as in `ModelSteps.capture`.
    """

    def __init__(self, number: int, new_graph: Callable[[], Graph] | None = None) -> None:
        self.number = number
        self.device = OpenDevice("cpu")
        self.shared: SharedWeights | None = None
        self.model: ComposedModel
        self._new_graph = new_graph
        self._pools: list[KVPool] = []
        self._made_steps: ModelSteps | None = None
        self._adapters: dict[int, LowRanks] = {}
        self._locks: Sequence[int] = ()
        """Descriptors of the worker's locks. While this process has them open, the worker counts
        as living (law 5)."""
        self._gone: list[Path] = []

    # Loading.

    def load(self, plan: ShardPlan) -> str:
        """Load this rank's shard. Returns the UUID of its GPU; empty without one."""
        self.device = open_device(plan.devices[self.number])
        ops = kvops.backend(plan.backend, plan.isa)
        if ops.native is not None:
            ops.native.assign([Lane()] * plan.num_threads)
        torch.set_num_threads(plan.num_threads)
        driver = self.device.driver
        if driver is not None and plan.keeper is not None:
            self.shared = SharedWeights(driver, plan.keeper, lambda: None)
        self.load_on(plan, ops)
        if self.shared is not None and self.shared.kept is not None:
            # In a thread, since this rank has no event loop.
            keep = self.shared.kept.keep()
            threading.Thread(target=asyncio.run, args=(keep,), daemon=True).start()
        return "" if driver is None else driver.uuid

    def load_on(self, plan: ShardPlan, ops: Backend, progress: Progress = lambda: None) -> None:
        """Load this rank's shard on its device. Raises ValueError if this rank's GPU lacks the
        kernels that rank 0 has chosen for its own."""
        self._plan, self._ops = plan, ops
        self.model = load_shard(
            plan.model,
            plan.dtype,
            ops,
            str(self.device.torch),
            rank=self.number,
            size=len(plan.devices),
            quantize=plan.quantize,
            dequantize=plan.dequantize,
            context=plan.context,
            progress=progress,
            shared=self.shared,
        )
        ops.check_attention(
            attention_shape(self.model.config, plan.block_size, plan.dtype, plan.kv_dtype)
        )

    def connect(self) -> None:
        """Connect with the other ranks; all have loaded their shards."""
        plan, config = self._plan, read_model_config(self._plan.model)
        shard = Shard(config, self.number, len(plan.devices))
        where = plan.meeting, shard, self.model.device, plan.timeout_s
        self.model.collectives = connect(*where, in_order=plan.sums_in_order)

    # Memory.

    def measure(self, layout: PoolLayout) -> int:
        """Take part in steps that measure rank 0's memory, and write nothing, until `leave`.
        Returns the bytes of this rank's GPU."""
        self._pools = [KVPool.private(layout, 1, str(self.device.torch))]
        return int(torch.cuda.get_device_properties(self.device.torch).total_memory)

    def make_memory(self, num_bytes: int) -> Descriptor:
        """Allocate memory on this rank's GPU, for a pool."""
        assert self.device.driver is not None
        try:
            with closing(CudaArena.create(self.device.driver, num_bytes)) as made:
                return Descriptor(os.dup(made.fd))
        except DriverError as error:
            raise StartupError(f"no memory for a pool on {self.device.name}: {error}") from error

    def join(
        self,
        pools: Sequence[tuple[PoolDirectory, PoolHeader]],
        max_num_seqs: int,
        *descriptors: int,
    ) -> None:
        """Map this rank's arenas of the worker's own pool, and of its swap pool if it has one.
        `descriptors` are of the locks of all pools, then of the memory of the pools on GPUs."""
        self.leave()
        self._locks, memory = descriptors[: len(pools)], iter(descriptors[len(pools) :])
        self._gone = [directory.gone for directory, header in pools if header.kind == "cuda"]
        for directory, header in pools:
            arena: Arena
            if header.kind == "file":
                arena = FileArena(directory.arena(self.number), header.arena_bytes)
            else:
                assert self.device.driver is not None
                arena = CudaArena.open(self.device.driver, next(memory), header.memory_bytes)
            self._pools.append(KVPool(arena, header.layout, header.num_blocks))
        self._steps.warm_up(max_num_seqs)

    def leave(self) -> None:
        """Unmap the arenas and close the locks, in this order: a rank without the locks writes no
        block."""
        for pool in self._pools:
            pool.wait_until_idle()
        self._made_steps = None  # with graphs, which know the arena's address
        for pool in self._pools:
            pool.close()
        self._pools = []
        close_all(self._locks)
        self._locks = ()

    def note_loss(self, error: Exception) -> None:
        """Mark the pool as gone if the error shows that the GPU has lost it."""
        if lost_device(error) is not None:
            for path in self._gone:
                path.touch(0o600)

    # Steps.

    @property
    def _steps(self) -> ModelSteps:
        """Steps on the worker's own pool."""
        if self._made_steps is None:
            kv = self._pools[0].kv
            self._made_steps = ModelSteps(self.model, kv, kv.shape[3], self._ops)
        return self._made_steps

    def capture(self, max_rows: int, max_tokens: int, max_lora_rank: int) -> None:
        """Record steps as graphs, see `ModelSteps.capture`."""
        self._steps.capture(max_rows, max_tokens, self._new_graph, max_lora_rank)

    def compute(self, call: StepCall) -> None:
        """Compute a step, whose tensors follow as one broadcast."""
        placed, facts = call.unpacked(self._received(sum(call.num_bytes), torch.uint8)), call.facts
        runs = [replace(run, adapter=self._adapters[run.adapter]) for run in facts.adapters]
        self._steps.compute(placed, replace(facts, adapters=tuple(runs)))

    def logits(self, num_states: int) -> None:
        """Compute this rank's logits of final states, which follow as one broadcast."""
        width = self.model.config.hidden_size
        self.model.logits(self._received(num_states * width, self.model.dtype).view(-1, width))

    def _received(self, num_values: int, dtype: torch.dtype) -> Tensor:
        assert self.model.collectives is not None
        values = torch.empty(num_values, dtype=dtype, device=self.model.device)
        if num_values:
            self.model.collectives.broadcast(values.view(torch.uint8))
        return values

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the worker's own pool."""
        self._steps.copy_blocks(pairs)

    def swap_blocks(self, out: bool, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the swap pool, or back."""
        own, swap_pool = self._pools
        source, target = (own, swap_pool) if out else (swap_pool, own)
        target.copy_from(source, self._ops, pairs)

    def load_adapter(self, number: int, files: AdapterFiles, gone: Sequence[int]) -> None:
        """Load this rank's part of an adapter, which steps call `number`. `gone` has the numbers of
        adapters that no later step has."""
        for one in gone:
            self._adapters.pop(one, None)
        self._adapters[number] = self.model.load_adapter(files)


def follow(connection: Connection, rank: Rank) -> None:
    """Execute the calls of rank 0 until it closes the connection. An error that is not answered is
    this rank's end, and so the worker's."""
    with torch.inference_mode():
        while True:
            try:
                call: Call = connection.recv()
            except EOFError:
                return
            descriptors = [recv_handle(connection) for _ in range(call.num_descriptors)]
            try:
                answer = execute(rank, call, descriptors)
            except Exception as error:
                rank.note_loss(error)
                raise
            if call.is_answered:
                connection.send(answer)
                if isinstance(answer.value, Descriptor):
                    send_handle(connection, answer.value, None)
                    close_all([answer.value])


def execute(rank: Rank, call: Call, descriptors: Sequence[int] = ()) -> RankAnswer:
    try:
        value = getattr(rank, call.method)(*call.arguments, *descriptors)
    except _FAILURES as error:
        if call.method not in _MAY_FAIL:
            raise
        rank.note_loss(error)
        return RankAnswer(failure=str(error) or type(error).__name__)
    if call.is_answered and rank.device.torch.type == "cuda":
        torch.cuda.synchronize(rank.device.torch)
    return RankAnswer(value)
