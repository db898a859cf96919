"""Rank 0's part: it tells the other ranks what it computes, before it computes its own shard."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvops import Backend
from services.common.checkpoint.adapter import AdapterFiles
from services.common.errors import StartupError
from services.common.pool.keeper import close_all
from services.common.text.model_config import ModelConfig
from services.engine.batch import Answer, Fault, Query
from services.engine.models.decoder import ComposedModel
from services.engine.models.model import Batch, Model
from services.engine.ranks.collectives import Collectives
from services.engine.ranks.messages import (
    CopyBlocks,
    Done,
    Logits,
    Message,
    SwapBlocks,
    encoded,
    packed,
    send,
)
from services.engine.runner import Runner
from services.engine.sampling.sampling_head import answer_in_parts

_POLL_S = 0.1

Pairs = Sequence[tuple[int, int]]


class Followers:
    """The connections to the other ranks, from rank 1 on. Several threads may use them.

    What runs in steps is told, and needs no answer: no rank gets past an exchange that another one
    has not reached. What is asked is done when `ask` returns.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._telling = threading.Lock()
        self._asking = threading.Lock()

    def tell(self, message: Message) -> None:
        """Send a message to all ranks."""
        octets = encoded(message)
        with self._telling:
            for connection in self._connections:
                connection.send_bytes(octets)

    def ask(self, message: Message, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """Send a message, call `meanwhile`, and wait until all ranks have done what it says.
        Returns their answers. StartupError: a rank could not."""
        with self._asking:
            self.tell(message)
            meanwhile()
            return self._take_answers()

    def ask_within(self, message: Message, limit_s: float) -> bool:
        """As `ask`, for `limit_s` only. Returns whether all ranks have done it."""
        give_up_at = time.monotonic() + limit_s
        if not self._asking.acquire(timeout=limit_s):
            return False
        try:
            self.tell(message)
            left = (max(0.0, give_up_at - time.monotonic()) for _ in self._connections)
            if not all(map(Connection.poll, self._connections, left)):
                return False
            self._take_answers()
        except OSError:  # a rank has ended
            return False
        finally:
            self._asking.release()
        return True

    def ask_each(
        self,
        messages: Sequence[Message],
        meanwhile: Callable[[], None] = lambda: None,
        descriptors: Sequence[Sequence[int]] = (),
    ) -> list[Any]:
        """Send each rank a message of its own, and duplicates of open descriptors; otherwise as
        `ask`."""
        with self._asking:
            with self._telling:
                for connection, message, own in zip(
                    self._connections, messages, descriptors or repeat(()), strict=False
                ):
                    send(connection, message)
                    for descriptor in own:
                        send_handle(connection, descriptor, None)
            meanwhile()
            return self._take_answers()

    def wait(self, progress: Callable[[], None]) -> None:
        """Call `progress` several times a second until all ranks have answered."""
        for connection in self._connections:
            while not connection.poll(_POLL_S):
                progress()

    def close(self) -> None:
        """Shut the connections down: the other ranks end. (Closing is not enough, while a thread
        polls them.)"""
        for connection in self._connections:
            with socket.socket(fileno=os.dup(connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _take_answers(self) -> list[Any]:
        values, failures, descriptors = [], [], []
        for number, connection in enumerate(self._connections, 1):
            done: Done = connection.recv()
            value = done.value
            if done.has_descriptor:
                value = recv_handle(connection)
                descriptors.append(value)
            if done.failure:
                failures.append(f"rank {number}: {done.failure}")
            values.append(value)
        if failures:
            close_all(descriptors)
            raise StartupError("; ".join(failures))
        return values


class LeadModel:
    """The `Model` of a worker of several ranks, at rank 0: each call runs on all ranks at once."""

    def __init__(self, shard: ComposedModel, collectives: Collectives, ranks: Followers) -> None:
        self._shard = shard
        self._collectives = collectives
        self._ranks = ranks
        self.weights_digest = shard.weights_digest
        self._hidden: Tensor | None = None

    @property
    def config(self) -> ModelConfig:
        """That of rank 0's shard: its heads are those of its arena."""
        return self._shard.config

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def load_adapter(self, files: AdapterFiles) -> NoReturn:
        raise ValueError("several ranks take no adapters yet")

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        message, octets = packed(batch, wanted)
        self._ranks.tell(message)
        self._collectives.broadcast(octets)
        self._hidden = self._shard.forward(batch, kv, wanted)
        return self._hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Other ranks have the states of the last `forward`; others, such as some of them, are sent
        to them."""
        if hidden is self._hidden:
            self._ranks.tell(Logits())
        else:
            self._ranks.tell(Logits(len(hidden)))
            self._collectives.broadcast(hidden.contiguous().view(torch.uint8))
        return self._shard.logits(hidden)

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        everything = list(range(len(hidden)))
        return answer_in_parts(
            lambda states: self.logits(hidden if states == everything else hidden[states]), queries
        )


class LeadRunner(Runner):
    """The runner of rank 0: the other ranks copy blocks of their arenas, too."""

    def __init__(
        self, model: Model, kv: Tensor, block_size: int, ops: Backend, ranks: Followers
    ) -> None:
        super().__init__(model, kv, block_size, ops)
        self._ranks = ranks

    def copy_blocks(self, pairs: Pairs) -> None:
        """Return when all ranks have copied: after that, another worker may read the copies."""
        copy = super().copy_blocks
        self._ranks.ask(CopyBlocks(tuple(pairs)), meanwhile=lambda: copy(pairs))


def swapping(
    ranks: Followers, copy: Callable[[Pairs], None], *, out: bool
) -> Callable[[Pairs], None]:
    """A copy between two pools, with the other ranks' parts of the blocks."""

    def swap(pairs: Pairs) -> None:
        ranks.ask(SwapBlocks(out, tuple(pairs)), meanwhile=lambda: copy(pairs))

    return swap
