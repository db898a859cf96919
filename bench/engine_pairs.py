"""Times decode steps beside the same with other sampling parameters, with LoRA adapters, or with
the masks of structured output, in turn."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.engine.batch import Draw, LoadedAdapter, Row, RowResult
from services.engine.models import Model
from services.engine.runner import Runner
from services.engine.sequences.grammar_state import GrammarState
from services.engine.sequences.penalty_state import PenaltyState
from services.model.checkpoint.adapter import AdapterFiles
from services.model.structured.grammar import Compiled, Grammar, compile_structure
from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary
from services.model.text.tokenizer import Tokenizer
from services.protocol.ticket import SamplingParams
from tests.adapters import make_adapter

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
_RANKED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy, penalties": _PENALTIES,
    "top_k, top_p": _RANKED,
    "top_k, top_p, penalties": {**_RANKED, **_PENALTIES},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "temperature": {"temperature": 0.8},
    "greedy, logprobs": {"logprobs": 5},
    "temperature, logprobs": {"temperature": 0.8, "logprobs": 5},
}
NUM_ADAPTERS = 4
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
class Pairs:
    """Medians; `ratio`: of the ratios of pairs."""

    what: str
    streams: int
    plain_ms: float
    with_ms: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.what:<28}{self.streams:>4} streams, {self.with_ms:.2f} ms a step, "
            f"{self.plain_ms:.2f} without: {self.ratio - 1:+.1%}"
        )


def in_turn(what: str, streams: int, rounds: int, step: Callable[[int, bool], float]) -> Pairs:
    """`step`: the seconds of a step of a round, with it or without."""
    pairs = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        seconds = {is_with: step(number, is_with) for is_with in order}
        pairs.append((seconds[False], seconds[True]))
    plain, other = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(other / plain for plain, other in pairs)
    return Pairs(what, streams, plain, other, ratio)


@dataclass(frozen=True, slots=True)
class Streams:
    """Decoding streams, each with a prompt of `context` - 1 tokens. A step draws the token behind
    it, and leaves the stream as it was."""

    runner: Runner
    table: Callable[[int], range]
    number: int
    context: int

    def prefill(self) -> None:
        for row in range(self.number):
            tokens = [7 + row] * (self.context - 1)
            self.runner.launch([Row(tokens, 0, self.table(row))]).result()

    def step(
        self, draws: Sequence[Draw], adapters: Sequence[LoadedAdapter | None]
    ) -> tuple[float, list[RowResult]]:
        """The seconds of a step, and what it drew."""
        rows = [
            Row([9], self.context - 1, self.table(row), draws=(draw,), adapter=adapter)
            for row, (draw, adapter) in enumerate(zip(draws, adapters, strict=True))
        ]
        began = time.perf_counter()
        with torch.inference_mode():
            results = self.runner.launch(rows).result()
        return time.perf_counter() - began, list(results)


def sampling(model: Model, streams: Streams, rounds: int) -> Iterator[Pairs]:
    """Beside greedy steps. Penalties count random tokens, of which half were generated."""
    streams.prefill()
    number, context = streams.number, streams.context
    generator = torch.Generator().manual_seed(0)
    shape = (number, context)
    texts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()

    def step(params: SamplingParams, _: int, draws_so: bool) -> float:
        histories = [PenaltyState(params, text, context // 2, [0]) for text in texts]
        draws = [Draw(params, row, each.adjustment()) for row, each in enumerate(histories)]
        plain = [Draw(GREEDY, 0)] * number
        return streams.step(draws if draws_so else plain, [None] * number)[0]

    for what, changes in SAMPLINGS.items():
        yield in_turn(what, number, rounds, partial(step, replace(GREEDY, **changes)))


def random_adapter(model: Model, checkpoint: Path, rank: int, seed: int) -> LoadedAdapter:
    """An adapter of all linears of attention and MLP."""
    with tempfile.TemporaryDirectory() as folder:
        directory = make_adapter(Path(folder), checkpoint, seed, r=rank)
        files = AdapterFiles.read(directory, model.config, rank)
        return LoadedAdapter(files.digest, model.load_adapter(files))


def adapters(
    model: Model, streams: Streams, checkpoint: Path, rank: int, rounds: int
) -> Iterator[Pairs]:
    streams.prefill()
    number = streams.number
    seeds = range(min(NUM_ADAPTERS, number))
    loaded = [random_adapter(model, checkpoint, rank, seed) for seed in seeds]
    none: list[LoadedAdapter | None] = [None] * number
    kinds: dict[str, list[LoadedAdapter | None]] = {
        f"1 adapter of rank {rank}": [loaded[0]] * number,
        f"{len(loaded)} adapters of rank {rank}": [
            loaded[row * len(loaded) // number] for row in range(number)
        ],
        "1 row with an adapter": [*none[1:], loaded[0]],
    }

    def step(of_rows: list[LoadedAdapter | None], _: int, adapts: bool) -> float:
        return streams.step([Draw(GREEDY, 0)] * number, of_rows if adapts else none)[0]

    for what, of_rows in kinds.items():
        yield in_turn(what, number, rounds, partial(step, of_rows))


def structured(model: Model, streams: Streams, directory: Path, rounds: int) -> Iterator[Pairs]:
    """Each stream writes a text of `SCHEMA`, as the model draws it, and another when it ends."""
    streams.prefill()
    eos, vocab_size = model.config.eos_token_ids, model.config.vocab_size
    compiled: Future[Compiled] = Future()
    vocabulary = Vocabulary.of(Tokenizer.from_directory(directory), vocab_size, eos)
    structure = Structure(StructureKind.JSON, json.dumps(SCHEMA))
    compiled.set_result(compile_structure(structure, vocabulary))
    texts: list[list[int]] = [[] for _ in range(streams.number)]
    states = [GrammarState(Grammar(compiled, vocab_size), text, 0) for text in texts]

    def step(temperature: float, number: int, masks: bool) -> float:
        params = replace(GREEDY, temperature=temperature, seed=number)
        draws = [
            Draw(params, row, grammar=state if masks else None) for row, state in enumerate(states)
        ]
        seconds, results = streams.step(draws, [None] * streams.number)
        for text, result in zip(texts, results if masks else (), strict=False):
            assert isinstance(result, tuple), result
            text += result
            if text[-1] in eos:
                text.clear()
        return seconds

    for what, temperature in (("greedy", 0.0), ("temperature", 0.8)):
        yield in_turn(what, streams.number, rounds, partial(step, temperature))
