"""Rank 0's part in what all ranks do: it calls the others, then does the same."""

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from kvops import Backend
from services.engine.device.graphs import Graph
from services.engine.device.steps import ModelSteps, Pairs, StepFacts
from services.engine.models.decoder import ComposedModel
from services.engine.ranks.calls import Peers
from services.engine.ranks.step_call import called
from services.model.checkpoint.adapter import AdapterFiles
from services.runtime.errors import StartupError


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class DividedAdapter:
    """An adapter at all ranks."""

    number: int
    """Its name at the other ranks."""
    own: Any
    """Rank 0's part."""


class DividedAdapters:
    """Loads adapters at all ranks, between two steps. The other ranks forget those that are gone
    here when the next one comes."""

    def __init__(self, model: ComposedModel, peers: Peers) -> None:
        self._model, self._peers = model, peers
        self._numbers = itertools.count()
        self._gone: list[int] = []

    def load(self, files: AdapterFiles) -> DividedAdapter:
        adapter = DividedAdapter(next(self._numbers), self._model.load_adapter(files))
        # Not sent there: Python may free an adapter anywhere, also in the middle of a message.
        weakref.finalize(adapter, self._gone.append, adapter.number)
        gone = tuple(self._gone)
        try:
            self._peers.ask("load_adapter", adapter.number, files, gone)
        except StartupError as error:
            raise ValueError(str(error)) from error
        del self._gone[: len(gone)]
        return adapter


class SharedSteps(ModelSteps):
    """The steps of all ranks, as rank 0 computes them."""

    def __init__(
        self, peers: Peers, model: ComposedModel, kv: Tensor, block_size: int, ops: Backend
    ) -> None:
        super().__init__(model, kv, block_size, ops)
        self._peers, self._shard = peers, model

    def capture(
        self,
        max_rows: int,
        max_tokens: int,
        new_graph: Callable[[], Graph] | None = None,
        max_lora_rank: int = 0,
    ) -> None:
        """All ranks record the same graphs in the same order, with the exchanges in them."""
        capture = partial(super().capture, max_rows, max_tokens, new_graph, max_lora_rank)
        self._peers.ask("capture", max_rows, max_tokens, max_lora_rank, meanwhile=capture)

    def compute(self, placed: Mapping[str, Tensor], facts: StepFacts) -> Tensor:
        """The tensors go from device to device: the host does not wait for tokens that only the
        device knows."""
        call, octets = called(placed, _with_adapters(facts, attrgetter("number")))
        self._peers.tell("compute", call)
        assert self._shard.collectives is not None
        self._shard.collectives.broadcast(octets)
        return super().compute(placed, _with_adapters(facts, attrgetter("own")))

    def copy_blocks(self, pairs: Pairs) -> None:
        """Return when all ranks have copied: after that, another worker may read the copies."""
        copy = super().copy_blocks
        self._peers.ask("copy_blocks", tuple(pairs), meanwhile=lambda: copy(pairs))


def _with_adapters(facts: StepFacts, part: Callable[[DividedAdapter], Any]) -> StepFacts:
    """The facts of a step with one part of its adapters."""
    runs = [replace(run, adapter=part(run.adapter)) for run in facts.adapters]
    return replace(facts, adapters=tuple(runs))
