"""Times decode steps with and without the masks of structured output, in turn."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.structured.grammar import Compiled, Grammar, compile_structure
from services.common.structured.structure import Structure, StructureKind
from services.common.structured.vocabulary import Vocabulary
from services.common.text.tokenizer import Tokenizer
from services.engine.batch import Draw, Row
from services.engine.models import Model
from services.engine.runner import Runner
from services.engine.sequences.grammar_state import GrammarState
from services.protocol.ticket import SamplingParams

_PART = {"id": {"type": "integer"}, "note": {"type": "string", "maxLength": 40}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "size": {"type": "number"},
        "at": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}},
        "parts": {
            "type": "array",
            "items": {"type": "object", "properties": _PART, "required": ["id", "note"]},
        },
    },
    "required": ["name", "kind", "size", "at", "tags", "parts"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Result:
    """Medians; `ratio`: of the ratios of pairs."""

    what: str
    streams: int
    plain_ms: float
    masked_ms: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.what:<14}{self.streams:>4} streams, {self.masked_ms:.2f} ms a step with masks, "
            f"{self.plain_ms:.2f} without: {self.ratio - 1:+.1%}"
        )


class StructuredRows:
    """Streams that write a text of `SCHEMA` each, as the model draws it, and another when it ends.
    Each token is drawn at the end of the same `context`."""

    def __init__(
        self,
        model: Model,
        runner: Runner,
        directory: Path,
        table: Callable[[int], range],
        streams: int,
        context: int,
    ) -> None:
        self._runner, self._table, self._context = runner, table, context
        self._eos = model.config.eos_token_ids
        tokenizer, vocab_size = Tokenizer.from_directory(directory), model.config.vocab_size
        compiled: Future[Compiled] = Future()
        structure = Structure(StructureKind.JSON, json.dumps(SCHEMA))
        vocabulary = Vocabulary.of(tokenizer, vocab_size, self._eos)
        compiled.set_result(compile_structure(structure, vocabulary))
        grammar = Grammar(compiled, vocab_size)
        self._texts: list[list[int]] = [[] for _ in range(streams)]
        self._states = [GrammarState(grammar, text, 0) for text in self._texts]
        for row in range(streams):
            runner.launch([Row([7 + row] * (context - 1), 0, table(row))]).result()

    def measured(self, what: str, temperature: float, rounds: int) -> Result:
        pairs = []
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            seconds = {masks: self._step(temperature, number, masks=masks) for masks in order}
            pairs.append((seconds[False], seconds[True]))
        plain, masked = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(masked / plain for plain, masked in pairs)
        return Result(what, len(self._texts), plain, masked, ratio)

    def _step(self, temperature: float, number: int, *, masks: bool) -> float:
        params = SamplingParams(temperature, 0, 1.0, 0.0, seed=number, max_tokens=1)
        start, draws = self._context - 1, []
        for row, state in enumerate(self._states):
            draws.append(Draw(params, row, grammar=state if masks else None))
        rows = [Row([9], start, self._table(row), draws=(d,)) for row, d in enumerate(draws)]
        began = time.perf_counter()
        with torch.inference_mode():
            results = self._runner.launch(rows).result()
        seconds = time.perf_counter() - began
        for text, result in zip(self._texts, results if masks else (), strict=False):
            assert isinstance(result, tuple), result
            text += result
            if text[-1] in self._eos:
                text.clear()
        return seconds


def structured(rows: StructuredRows, rounds: int) -> Iterator[Result]:
    yield rows.measured("greedy", 0.0, rounds)
    yield rows.measured("temperature", 0.8, rounds)
