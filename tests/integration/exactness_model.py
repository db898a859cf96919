"""The model of a deployment in one process, with a record of what it computes for the request that
is compared."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

import kvops
from kvops.native import Lane
from services.engine.batch import Fault, Row, RowOutput, RowResult
from services.engine.forward import Flight
from services.engine.models import Model, load_model
from services.engine.runner import Runner
from services.engine.sampling.sampling_batch import SamplingBatch
from services.engine.speculation.draft_model import DraftModel
from services.gateway.workers.models import catalog
from tests.drafting import is_wrong
from tests.exactness import SEED
from tests.late_device import CompleteFlight, LateForward

LIMIT_S = 30.0
NUM_DRAFT_BLOCKS = 1200

Logits = dict[tuple[int, int], set[bytes]]
"""By (sequence, position): the bytes of all logits that a token was ever drawn from."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A row of the compared request. `num_rows`: rows of the whole step. `num_tokens`: tokens of
    this row. `num_adopted`: those in blocks that another request had computed.
    `num_step_tokens`: tokens of the whole step."""

    num_rows: int
    num_tokens: int
    num_adopted: int
    num_blocks: int
    num_step_tokens: int


class Models:
    """A model for each worker, loaded once, with native threads of its own."""

    def __init__(self, checkpoint: Path, adapter: Path) -> None:
        self.directory, self.adapter = checkpoint, adapter
        self.text = catalog.load_model(str(checkpoint))
        self.of = cache(self._load)

    def _load(self, worker: str, num_threads: int) -> tuple[Model, kvops.Backend]:
        ops = kvops.backend("cpu")
        assert ops.native is not None
        ops.native.assign([Lane()] * num_threads)
        return load_model(self.directory, torch.bfloat16, ops), ops


def draft_model(
    model: Model, ops: Any, arena: torch.Tensor, block_size: int, *, is_late: bool
) -> DraftModel:
    """The model as its own draft model, with KV in blocks like those of `arena`. `is_late`: it
    launches all passes of a step before it has a draft, and runs ahead of the target's step; every
    second of its drafts is wrong then."""
    private = torch.full((NUM_DRAFT_BLOCKS, *arena.shape[1:]), float("nan"), dtype=arena.dtype)
    runner_type = HalfWrong if is_late else Runner
    runner = runner_type(model, private, block_size, ops)

    forward = LateForward(runner, most_flights=64) if is_late else runner

    def compute(rows: Sequence[Row]) -> Sequence[RowResult]:
        return forward.launch(rows).result()

    launch = forward.launch if is_late else None
    return DraftModel(
        compute, NUM_DRAFT_BLOCKS, block_size, context=512, launch=launch, runs_ahead=is_late
    )


class HalfWrong(Runner):
    """A draft model's runner that changes every second token that it draws."""

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Flight:
        results = super().launch(rows, copies).result()
        return CompleteFlight([_half_wrong(*each) for each in zip(rows, results, strict=True)])


def _half_wrong(row: Row, result: RowResult) -> RowResult:
    position = row.start + len(row.token_ids) + 1
    if not row.draws or not isinstance(result, tuple):
        return result
    if not is_wrong(row.draws[0].sequence_index, position, 2):
        return result
    return tuple(abs(token - 1) for token in result)


def _drawn_after_wrong_draft(
    rows: Sequence[Row], results: Sequence[RowResult]
) -> Iterator[tuple[int, int]]:
    """(sequence, position) of each token that the compared request drew after a wrong draft."""
    for row, result in zip(rows, results, strict=True):
        if not row.num_drafts or row.draws[0].sampling.seed != SEED:
            continue
        assert not isinstance(result, Fault)
        tokens = result.tokens if isinstance(result, RowOutput) else result
        first = row.start + len(row.token_ids) - row.num_drafts
        drafts = row.token_ids[-row.num_drafts :]
        pairs = zip(drafts, tokens, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for number in range(num_right + 1, row.num_drafts + 1):
            yield row.draws[0].sequence_index, first + number


class Watched(Runner):
    """A runner that records the rows of the compared request, and can pause.

    A row belongs to this request if it has its seed, or tokens of its prompt. `pause_every`: after
    how many steps with such a row the runner pauses, until `go_on`; 0: never.
    """

    def __init__(self, model: Model, arena: torch.Tensor, block_size: int, ops: Any) -> None:
        super().__init__(model, arena, block_size, ops)
        self.gate = threading.Event()
        self.gate.set()
        self.prompt: tuple[int, ...] = ()
        self.pause_every = 0
        self.is_paused = False
        self.seen: list[Seen] = []
        self.logits_of: Logits = defaultdict(set)
        self._new: list[tuple[tuple[int, int], bytes]] = []
        self._num_steps = 0

    def go_on(self) -> None:
        if self.is_paused:
            self._num_steps = -1  # steps that were launched meanwhile pause no other request
        self.is_paused = False
        self.gate.set()

    @property
    def num_lanes(self) -> int:
        assert self._ops.native is not None
        return self._ops.native.num_lanes

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Flight:
        if not self.gate.is_set():
            self.is_paused = True
            assert self.gate.wait(LIMIT_S)
        flight = super().launch(rows, copies)
        ours = [row for row in rows if self._is_ours(row)]
        void = set(_drawn_after_wrong_draft(rows, flight.result()))
        for key, state in self._new:
            if key not in void:
                self.logits_of[key].add(state)
        self._new.clear()
        num_tokens = sum(len(row.token_ids) for row in rows)
        self.seen += [
            Seen(len(rows), len(row.token_ids), row.store_from, len(row.block_table), num_tokens)
            for row in ours
        ]
        self._num_steps += bool(ours)
        due = self._num_steps > 0 and self.pause_every and not self._num_steps % self.pause_every
        if ours and due:
            self.gate.clear()
        return flight

    def _forward(self, rows: Sequence[Row], batch: SamplingBatch, others: Any) -> Any:
        hidden, placed = super()._forward(rows, batch, others)
        ours = [i for i, draw in enumerate(batch.draws) if draw.sampling.seed == SEED]
        if ours:
            logits = self._model.logits(batch.states_of(hidden))
            for i in ours:
                state = logits[batch.states[i]].numpy().tobytes()
                self._new.append(((batch.draws[i].sequence_index, batch.positions[i]), state))
        return hidden, placed

    def _is_ours(self, row: Row) -> bool:
        if row.draws:
            return row.draws[0].sampling.seed == SEED
        of_prompt = self.prompt[row.start :][: len(row.token_ids)]
        return bool(of_prompt) and tuple(row.token_ids)[: len(of_prompt)] == of_prompt
