"""The part of every other rank: it does what rank 0 tells it, and stamps and reports nothing."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import kvops
from kvops.cuda.vmm import DriverError
from kvops.native import Lane
from services.common.checkpoint.shards import Shard
from services.common.errors import StartupError
from services.common.pool.keeper import close_all
from services.common.pool.layout import PoolLayout
from services.common.text.model_config import ModelConfig
from services.engine.device.gpu_memory import CudaMeter, GpuMemoryPlan, Measurement
from services.engine.device.graphs import Graph
from services.engine.device.inputs import block_pairs
from services.engine.device.opening import OpenDevice, lost_device, open_device
from services.engine.device.steps import ModelSteps, StepFacts, attention_shape
from services.engine.models.decoder import ComposedModel, LowRanks
from services.engine.models.load import load_shard
from services.engine.pool import Arena, CudaArena, FileArena, KVPool
from services.engine.ranks.collectives import Collectives, connect
from services.engine.ranks.messages import (
    BeginMeasuring,
    Capture,
    Connect,
    CopyBlocks,
    Done,
    EndMeasuring,
    Forward,
    Join,
    Leave,
    Load,
    LoadAdapter,
    Logits,
    MakeMemory,
    RankArena,
    SwapBlocks,
    num_octets,
    send,
    unpacked,
)
from services.engine.weights.placement import SharedWeights

_FAILURES = (
    *(StartupError, kvops.BackendUnavailable, DriverError),
    *(RuntimeError, OSError, ValueError, SafetensorError),
)
"""Errors that are rank 0's, which names the rank; any other one ends this process."""


def follow(connection: Connection, new_graph: Callable[[], Graph] | None = None) -> None:
    """Do what rank 0 says until it closes the connection. Any other error is this rank's end, and
    so the worker's. `new_graph`: see `ModelSteps.capture`."""
    follower = _Follower(connection, new_graph)
    with torch.inference_mode():
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            try:
                follower.do(message)
            except Exception as error:
                follower.note_loss(error)
                raise


class _Follower:
    """A rank: its shard, and what it has of the worker's pools. `_locks`: descriptors of the
    worker's locks. While this process has them open, the worker counts as living (law 5).
    `new_graph`: see `ModelSteps.capture`."""

    def __init__(
        self, connection: Connection, new_graph: Callable[[], Graph] | None = None
    ) -> None:
        self._connection = connection
        self._device = OpenDevice("cpu")
        self._shared: SharedWeights | None = None
        self._pools: list[KVPool] = []
        self._steps: ModelSteps | None = None
        self._new_graph = new_graph
        self._measured: Measurement | None = None
        self._adapters: dict[int, LowRanks] = {}
        self._locks: list[int] = []
        self._gone: list[Path] = []

    def do(self, message: object) -> None:
        match message:
            case Forward():
                octets = torch.empty(
                    num_octets(message), dtype=torch.uint8, device=self._model.device
                )
                self._collectives.broadcast(octets)
                facts = self._with_adapters(message.facts)
                self._hidden = self._own_steps.compute(unpacked(message, octets), facts)
            case Logits():
                states = self._hidden
                if message.num_states is not None:
                    states = states.new_empty(message.num_states, states.shape[1])
                    self._collectives.broadcast(states.view(torch.uint8))
                self._model.logits(states)
            case CopyBlocks():
                pairs = block_pairs(message.pairs, self._model.device)
                self._ops.copy_blocks(self._pools[0].kv, pairs)
                self._answer()
            case SwapBlocks():
                own, swap_pool = self._pools
                source, target = (own, swap_pool) if message.out else (swap_pool, own)
                target.copy_from(source, self._ops, message.pairs)
                self._answer()
            case LoadAdapter():
                self._try(lambda: self._load_adapter(message))
            case Load():
                self._try(lambda: self._load(message))
            case Connect():
                self._try(self._connect)
            case BeginMeasuring():
                self._try(lambda: self._begin_measuring(message.layout))
            case EndMeasuring():
                self._try(lambda: self._end_measuring(message))
            case MakeMemory():
                self._make_memory(message.num_bytes)
            case Join():
                found = [
                    (recv_handle(self._connection), self._memory_of(a)) for a in message.arenas
                ]
                self._try(lambda: self._join(message, found))
            case Capture():
                # An error ends this rank, and so the worker: others wait in exchanges.
                self._capture(message.max_rows)
                self._answer()
            case Leave():
                self._leave()
                self._answer()

    def note_loss(self, error: Exception) -> None:
        """Mark the pool as gone if the error shows that the GPU has lost it."""
        if lost_device(error) is not None:
            for path in self._gone:
                path.touch(0o600)

    def _load(self, message: Load) -> str:
        self._loaded = message
        self._device = open_device(message.device)
        self._ops = kvops.backend(message.backend, message.isa)
        if self._ops.native is not None:
            self._ops.native.assign([Lane()] * message.num_threads)
        torch.set_num_threads(message.num_threads)
        self._shared = self._sharing(message)
        self._model: ComposedModel = load_shard(
            *(message.model, message.dtype, self._ops, str(self._device.torch)),
            *(message.rank, message.size, message.context),
            shared=self._shared,
        )
        self._check_attention(message)
        if self._shared and self._shared.kept:
            # In a thread, since this rank has no event loop.
            keep = self._shared.kept.keep()
            threading.Thread(target=asyncio.run, args=(keep,), daemon=True).start()
        return "" if self._device.driver is None else self._device.driver.uuid

    def _check_attention(self, message: Load) -> None:
        """ValueError: this rank's GPU cannot compute what rank 0 has chosen for its own."""
        config, dtype = self._model.config, self._model.dtype
        self._ops.check_attention(
            attention_shape(config, message.block_size, dtype, message.kv_dtype)
        )

    def _sharing(self, message: Load) -> SharedWeights | None:
        driver = self._device.driver
        if driver is None or message.keeper is None:
            return None
        measure = self._meter.other if message.measures else lambda: 0
        return SharedWeights(driver, message.keeper, lambda: None, measure)

    @property
    def _meter(self) -> CudaMeter:
        assert self._device.driver is not None
        return CudaMeter(self._device.torch, self._device.driver.uuid)

    def _connect(self) -> None:
        message = self._loaded
        config = ModelConfig.from_directory(message.model)
        shard = Shard(config, message.rank, message.size)
        device = self._model.device
        self._collectives: Collectives = connect(message.meeting, shard, device, message.timeout_s)
        self._model.collectives = self._collectives

    def _begin_measuring(self, layout: PoolLayout) -> None:
        self._measured = Measurement(self._meter, self._device.torch, layout)
        self._pools, self._steps = [self._measured.pool], None

    def _end_measuring(self, message: EndMeasuring) -> GpuMemoryPlan:
        measured, self._measured = self._measured, None
        assert measured is not None
        self._leave()
        return measured.plan(message.num_workers, message.utilization, self._shared)

    @property
    def _own_steps(self) -> ModelSteps:
        """Steps on the worker's own pool."""
        if self._steps is None:
            kv = self._pools[0].kv
            self._steps = ModelSteps(self._model, kv, kv.shape[3], self._ops)
        return self._steps

    def _capture(self, max_rows: int) -> None:
        with self._measured.graphs() if self._measured else nullcontext():
            self._own_steps.capture(max_rows, self._new_graph)

    def _load_adapter(self, message: LoadAdapter) -> None:
        for number in message.gone:
            self._adapters.pop(number, None)
        self._adapters[message.number] = self._model.load_adapter(message.files)

    def _with_adapters(self, facts: StepFacts) -> StepFacts:
        runs = [replace(run, adapter=self._adapters[run.adapter]) for run in facts.adapters]
        return replace(facts, adapters=tuple(runs)) if runs else facts

    def _make_memory(self, num_bytes: int) -> None:
        assert self._device.driver is not None
        try:
            made = CudaArena.create(self._device.driver, num_bytes)
        except DriverError as error:
            self._answer(f"no memory for a pool on {self._device.name}: {error}")
            return
        with closing(made):
            send(self._connection, Done(has_descriptor=True))
            send_handle(self._connection, made.fd, None)

    def _memory_of(self, arena: RankArena) -> int | None:
        return recv_handle(self._connection) if arena.path is None else None

    def _join(self, message: Join, found: list[tuple[int, int | None]]) -> None:
        self._leave()
        self._locks = [lock for lock, _ in found]
        self._gone = [one.gone for one in message.arenas if one.path is None]
        for one, (_, memory) in zip(message.arenas, found, strict=True):
            self._pools.append(KVPool(self._open(one, memory), one.layout, one.num_blocks))
        self._own_steps.warm_up(message.max_num_seqs)

    def _open(self, one: RankArena, memory: int | None) -> Arena:
        if one.path is not None:
            return FileArena(one.path, one.num_bytes)
        assert memory is not None
        assert self._device.driver is not None
        return CudaArena.open(self._device.driver, memory, one.num_bytes)

    def _leave(self) -> None:
        """In this order: a rank without the locks writes no block."""
        for pool in self._pools:
            pool.wait_until_idle()
        self._steps = None  # with graphs, which know the arena's address
        for pool in self._pools:
            pool.close()
        self._pools = []
        close_all(self._locks)
        self._locks = []

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            value = work()
        except _FAILURES as error:
            self.note_loss(error)
            self._answer(str(error) or type(error).__name__)
        else:
            self._answer(value=value)

    def _answer(self, failure: str = "", value: Any = None) -> None:
        if self._device.torch.type == "cuda":
            torch.cuda.synchronize(self._device.torch)
        send(self._connection, Done(failure, value))
