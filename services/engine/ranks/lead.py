"""Rank 0's part: it tells the other ranks what it computes, before it computes its own shard."""

import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kvops import Backend
from services.common.checkpoint.adapter import AdapterFiles
from services.common.errors import StartupError
from services.common.pool.keeper import close_all
from services.common.text.model_config import ModelConfig
from services.engine.batch import Answer, Fault, Query
from services.engine.device.graphs import Graph
from services.engine.device.steps import ModelSteps, StepFacts
from services.engine.models.decoder import ComposedModel
from services.engine.models.model import Batch
from services.engine.ranks.collectives import Collectives
from services.engine.ranks.messages import (
    Capture,
    CopyBlocks,
    Done,
    LoadAdapter,
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
                    self._connections, messages, descriptors or itertools.repeat(()), strict=False
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


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class DividedAdapter:
    """An adapter at all ranks. `number`: what the other ranks know it by. `own`: rank 0's part."""

    number: int
    own: Any


class LeadModel:
    """The `Model` of a worker of several ranks, at rank 0. `LeadSteps` computes its steps.

    `last_states`: those that all ranks have computed last.
    """

    def __init__(self, shard: ComposedModel, collectives: Collectives, ranks: Followers) -> None:
        self._shard = shard
        self._collectives = collectives
        self.ranks = ranks
        self.weights_digest = shard.weights_digest
        self.last_states: Tensor | None = None
        self._numbers = itertools.count()
        self._gone: list[int] = []

    @property
    def config(self) -> ModelConfig:
        """That of rank 0's shard: its heads are those of its arena."""
        return self._shard.config

    @property
    def whole_config(self) -> ModelConfig:
        return self._shard.whole_config

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def load_adapter(self, files: AdapterFiles) -> DividedAdapter:
        """The other ranks load their parts between two steps. They forget those that are gone here
        when the next one comes."""
        adapter = DividedAdapter(next(self._numbers), self._shard.load_adapter(files))
        # Not told there: Python may free an adapter anywhere, also in the middle of a message.
        weakref.finalize(adapter, self._gone.append, adapter.number)
        gone = tuple(self._gone)
        try:
            self.ranks.ask(LoadAdapter(adapter.number, files, gone))
        except StartupError as error:
            raise ValueError(str(error)) from error
        del self._gone[: len(gone)]
        return adapter

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """Rank 0's part, with exchanges in which the other ranks take part when they are told the
        step."""
        return self._shard.forward(batch, kv, wanted)

    def tell_step(self, placed: Mapping[str, Tensor], facts: StepFacts) -> None:
        """Let the other ranks compute a step, see `ModelSteps.compute`."""
        message, octets = packed(placed, facts)
        self.ranks.tell(message)
        self._collectives.broadcast(octets)

    def logits(self, hidden: Tensor) -> Tensor:
        """Other ranks have the states of the last step; others, such as some of them, are sent to
        them."""
        if hidden is self.last_states:
            self.ranks.tell(Logits())
        else:
            self.ranks.tell(Logits(len(hidden)))
            self._collectives.broadcast(hidden.contiguous().view(torch.uint8))
        return self._shard.logits(hidden)

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        everything = list(range(len(hidden)))
        return answer_in_parts(
            lambda states: self.logits(hidden if states == everything else hidden[states]), queries
        )


class LeadSteps(ModelSteps):
    """The steps of all ranks: told to the others, then computed here."""

    def __init__(self, model: LeadModel, kv: Tensor, block_size: int, ops: Backend) -> None:
        super().__init__(model, kv, block_size, ops)
        self._lead = model

    def capture(self, max_rows: int, new_graph: Callable[[], Graph] | None = None) -> None:
        """All ranks record the same graphs in the same order, with the exchanges in them."""
        capture = super().capture
        self._lead.ranks.ask(Capture(max_rows), meanwhile=lambda: capture(max_rows, new_graph))

    def compute(self, placed: Mapping[str, Tensor], facts: StepFacts) -> Tensor:
        self._lead.tell_step(placed, _with_adapters(facts, attrgetter("number")))
        hidden = super().compute(placed, _with_adapters(facts, attrgetter("own")))
        self._lead.last_states = hidden
        return hidden


def _with_adapters(facts: StepFacts, part: Callable[[DividedAdapter], Any]) -> StepFacts:
    """The facts of a step with one part of its adapters."""
    if not facts.adapters:
        return facts
    runs = [replace(run, adapter=part(run.adapter)) for run in facts.adapters]
    return replace(facts, adapters=tuple(runs))


class LeadRunner(Runner):
    """The runner of rank 0: the other ranks compute its steps, and copy blocks of their arenas."""

    def __init__(self, model: LeadModel, kv: Tensor, block_size: int, ops: Backend) -> None:
        steps = LeadSteps(model, kv, block_size, ops)
        super().__init__(model, kv, block_size, ops, steps)
        self._ranks = model.ranks

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
