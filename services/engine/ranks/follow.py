"""The part of every other rank: it does what rank 0 tells it, and stamps and reports nothing."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from os import close

import torch

import kvops
from kvops.native import Lane
from services.common.checkpoint.shards import Shard
from services.common.errors import StartupError
from services.common.text.model_config import ModelConfig
from services.engine.models.decoder import ComposedModel
from services.engine.models.load import load_shard
from services.engine.pool import FileArena, KVPool
from services.engine.ranks.collectives import Collectives, connect
from services.engine.ranks.messages import (
    ArenaFile,
    Connect,
    CopyBlocks,
    Done,
    Forward,
    Join,
    Leave,
    Load,
    Logits,
    SwapBlocks,
    num_octets,
    send,
    unpacked,
)


def follow(connection: Connection) -> None:
    """Do what rank 0 says until it closes the connection. Any other error is this rank's end, and
    so the worker's."""
    follower = _Follower(connection)
    with torch.inference_mode():
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            follower.do(message)


def _pool(one: ArenaFile) -> KVPool:
    arena = FileArena(one.path, one.num_blocks * one.layout.block_bytes)
    return KVPool(arena, one.layout, one.num_blocks)


class _Follower:
    """A rank: its shard, and what it has of the worker's pools. `_locks`: descriptors of the
    worker's locks. While this process has them open, the worker counts as living (law 5)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pools: list[KVPool] = []
        self._locks: list[int] = []

    def do(self, message: object) -> None:
        match message:
            case Forward():
                octets = torch.empty(
                    num_octets(message), dtype=torch.uint8, device=self._model.device
                )
                self._collectives.broadcast(octets)
                batch, wanted = unpacked(message, octets)
                self._hidden = self._model.forward(batch, self._pools[0].kv, wanted)
            case Logits():
                states = message.states
                hidden = self._hidden if states is None else self._hidden[list(states)]
                self._model.logits(hidden)
            case CopyBlocks():
                pairs = torch.tensor(message.pairs, device=self._model.device).view(-1, 2)
                self._ops.copy_blocks(self._pools[0].kv, pairs)
                self._answer()
            case SwapBlocks():
                own, swap_pool = self._pools
                source, target = (own, swap_pool) if message.out else (swap_pool, own)
                target.copy_from(source, self._ops, message.pairs)
                self._answer()
            case Load():
                self._try(lambda: self._load(message))
            case Connect():
                self._try(self._connect)
            case Join():
                locks = [recv_handle(self._connection) for _ in message.arenas]
                self._try(lambda: self._join(message, locks))
            case Leave():
                self._leave()
                self._answer()

    def _load(self, message: Load) -> None:
        self._loaded = message
        self._ops = kvops.backend(message.backend, message.isa)
        if self._ops.native is not None:
            self._ops.native.assign([Lane()] * message.num_threads)
        torch.set_num_threads(message.num_threads)
        self._model: ComposedModel = load_shard(
            *(message.model, message.dtype, self._ops, message.device),
            *(message.rank, message.size, message.context),
        )

    def _connect(self) -> None:
        message = self._loaded
        config = ModelConfig.from_directory(message.model)
        shard = Shard(config, message.rank, message.size)
        device = self._model.device
        self._collectives: Collectives = connect(message.meeting, shard, device, message.timeout_s)
        self._model.collectives = self._collectives

    def _join(self, message: Join, locks: list[int]) -> None:
        self._leave()
        self._locks = locks
        self._pools = [_pool(one) for one in message.arenas]
        config = self._model.config
        kv_layer = self._pools[0].kv[:, 0]
        self._ops.warm_up(kv_layer, config.num_heads, message.max_num_seqs, config.attention_cap)

    def _leave(self) -> None:
        """In this order: a rank without the locks writes no block."""
        for pool in self._pools:
            pool.close()
        self._pools = []
        for lock in self._locks:
            close(lock)
        self._locks = []

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (StartupError, kvops.BackendUnavailable, RuntimeError, OSError, ValueError) as error:
            self._answer(str(error) or type(error).__name__)
        else:
            self._answer()

    def _answer(self, failure: str = "") -> None:
        if self._device_is_gpu:
            torch.cuda.synchronize(self._model.device)
        send(self._connection, Done(failure))

    @property
    def _device_is_gpu(self) -> bool:
        return torch.device(self._loaded.device).type == "cuda"
