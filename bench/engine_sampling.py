"""Measures the cost of choosing tokens, as a share of a decode step."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from services.engine.batch import Draw, Row
from services.engine.models import Model
from services.engine.runner import Runner
from services.engine.sampling.sampling_batch import SamplingBatch
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams

_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
_RANKED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": _PENALTIES,
    "top_k, top_p": _RANKED,
    "top_k, top_p, penalties": {**_RANKED, **_PENALTIES},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "temperature": {"temperature": 0.8},
    "greedy, logprobs": {"logprobs": 5},
    "temperature, logprobs": {"temperature": 0.8, "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class Result:
    """Medians. `sampling_ms`: what a step has beside the pass and the head's product."""

    what: str
    streams: int
    step_ms: float
    sampling_ms: float

    def __str__(self) -> str:
        share = f"{self.sampling_ms / self.step_ms:.1%} of a step of {self.step_ms:.1f} ms"
        return f"{self.what:<24}{self.streams:>4} streams {self.sampling_ms:>8.3f} ms, {share}"


class Rows:
    """Decoding sequences of `context` tokens, of which a half was generated."""

    def __init__(
        self,
        model: Model,
        runner: Runner,
        table: Callable[[int], range],
        streams: int,
        context: int,
    ) -> None:
        self.model, self.runner, self.table, self.context = model, runner, table, context
        generator = torch.Generator().manual_seed(0)
        shape = (streams, context)
        ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
        self.tokens: list[list[int]] = ids.tolist()
        for row, tokens in enumerate(self.tokens):
            runner.launch([Row(tokens[:-1], 0, table(row))]).result()

    def measured(self, what: str, params: SamplingParams, rounds: int) -> Result:
        histories = [PenaltyState(params, tokens, self.context // 2, [0]) for tokens in self.tokens]

        def rows() -> list[Row]:
            draws = [
                Draw(params, row, history.adjustment()) for row, history in enumerate(histories)
            ]
            return [
                Row(tokens[-1:], self.context - 1, self.table(row), draws=(draw,))
                for row, (tokens, draw) in enumerate(zip(self.tokens, draws, strict=True))
            ]

        hidden = self.runner.hidden(rows())

        actions = (
            lambda: self.runner.launch(rows()).result(),
            lambda: self.model.draw(hidden, SamplingBatch.of(rows()), [None] * len(self.tokens)),
            lambda: self.model.logits(hidden),
        )
        with torch.inference_mode():
            times = [[_seconds(action) for action in actions] for _ in range(rounds)]
        step, chosen, head = (
            1000 * statistics.median(column) for column in zip(*times, strict=True)
        )
        return Result(what, len(self.tokens), step, max(0.0, chosen - head))


def sampling(rows: Rows, rounds: int) -> Iterator[Result]:
    plain = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
    for what, changes in KINDS.items():
        yield rows.measured(what, replace(plain, **changes), rounds)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
