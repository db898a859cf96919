"""Times decode steps with and without the masks of structured output, in turn."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import torch

from bench.engine_pairs import Pairs, in_turn
from services.engine.batch import Draw, Row
from services.engine.models import Model
from services.engine.runner import Runner
from services.engine.sequences.grammar_state import GrammarState
from services.model.structured.grammar import Compiled, Grammar, compile_structure
from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary
from services.model.text.tokenizer import Tokenizer
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

    def measured(self, what: str, temperature: float, rounds: int) -> Pairs:
        def step(number: int, masks: bool) -> float:
            return self._step(temperature, number, masks=masks)

        return in_turn(what, len(self._texts), rounds, step)

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


def structured(rows: StructuredRows, rounds: int) -> Iterator[Pairs]:
    yield rows.measured("greedy", 0.0, rounds)
    yield rows.measured("temperature", 0.8, rounds)
