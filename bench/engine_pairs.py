"""Times decode steps beside the same with other sampling parameters, with LoRA adapters, or with
the masks of structured output, in turn."""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness import in_turn
from bench.steps import GREEDY, Steps
from services.engine.batch import Draw, LoadedAdapter, RowResult
from services.engine.models import Model
from services.engine.sequences.grammar_state import GrammarState
from services.engine.sequences.penalty_state import PenaltyState
from services.model.checkpoint.adapter import AdapterFiles
from services.model.structured.grammar import Compiled, Grammar, compile_structure
from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary
from services.model.text.tokenizer import Tokenizer
from services.protocol.ticket import SamplingParams
from tests.adapters import make_adapter

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
    """Medians of steps with something and without it."""

    what: str
    streams: int
    plain_ms: float
    with_ms: float
    ratio: float
    """The median of the ratios of pairs."""

    def __str__(self) -> str:
        return (
            f"{self.what:<28}{self.streams:>4} streams, {self.with_ms:.2f} ms a step, "
            f"{self.plain_ms:.2f} without: {self.ratio - 1:+.1%}"
        )


class Streams:
    """Decoding streams, each with a prompt of `context` - 1 tokens. A step draws the token behind
    it, and leaves the stream as it was."""

    def __init__(self, steps: Steps, number: int, context: int, rounds: int) -> None:
        self.number, self.context = number, context
        self.config, self.model = steps.model.config, steps.model
        self._steps, self._rounds = steps, rounds
        for row in range(number):
            steps.prefill(row, [7 + row] * (context - 1), context)

    def step(
        self, draws: Sequence[Draw], adapters: Sequence[LoadedAdapter | None] = ()
    ) -> tuple[float, list[RowResult]]:
        """The seconds of a step, and what it draws."""
        rows = [
            self._steps.row(row, [9], self.context - 1, (draw,)) for row, draw in enumerate(draws)
        ]
        if adapters:
            pairs = zip(rows, adapters, strict=True)
            rows = [replace(row, adapter=adapter) for row, adapter in pairs]
        return self._steps.timed(rows)

    def greedy(self, _: int = 0) -> float:
        """The seconds of a step without anything."""
        return self.step([GREEDY] * self.number)[0]

    def pairs(
        self, what: str, step: Callable[[int], float], plain: Callable[[int], float] | None = None
    ) -> Pairs:
        """Steps in turn with plain ones, which are greedy by default. Each call gets the number of
        its round and returns the seconds of its step."""
        found = in_turn({"plain": plain or self.greedy, "with": step}, self._rounds)
        ratios = [b / a for a, b in zip(found["plain"], found["with"], strict=True)]
        plain_s, with_s = (statistics.median(seconds) for seconds in found.values())
        ratio = statistics.median(ratios)
        return Pairs(what, self.number, 1000 * plain_s, 1000 * with_s, ratio)


def sampling(streams: Streams) -> Iterator[Pairs]:
    """Penalties count random tokens, of which half were generated."""
    shape = (streams.number, streams.context)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, streams.config.vocab_size, shape, generator=generator).tolist()

    def step(params: SamplingParams, _: int) -> float:
        histories = [PenaltyState(params, text, streams.context // 2, [0]) for text in texts]
        draws = [Draw(params, row, each.adjustment()) for row, each in enumerate(histories)]
        return streams.step(draws)[0]

    for what, changes in SAMPLINGS.items():
        yield streams.pairs(what, partial(step, replace(GREEDY.sampling, **changes)))


def random_adapter(model: Model, checkpoint: Path, rank: int, seed: int) -> LoadedAdapter:
    """An adapter of all linears of attention and MLP."""
    with tempfile.TemporaryDirectory() as folder:
        directory = make_adapter(Path(folder), checkpoint, seed, r=rank)
        files = AdapterFiles.read(directory, model.config, rank)
        return LoadedAdapter(files.digest, model.load_adapter(files))


def adapters(streams: Streams, checkpoint: Path, rank: int) -> Iterator[Pairs]:
    number = streams.number
    seeds = range(min(NUM_ADAPTERS, number))
    loaded = [random_adapter(streams.model, checkpoint, rank, seed) for seed in seeds]
    none: list[LoadedAdapter | None] = [None] * number
    kinds: dict[str, list[LoadedAdapter | None]] = {
        f"1 adapter of rank {rank}": [loaded[0]] * number,
        f"{len(loaded)} adapters of rank {rank}": [
            loaded[row * len(loaded) // number] for row in range(number)
        ],
        "1 row with an adapter": [*none[1:], loaded[0]],
    }

    def step(of_rows: list[LoadedAdapter | None], _: int) -> float:
        return streams.step([GREEDY] * number, of_rows)[0]

    for what, of_rows in kinds.items():
        yield streams.pairs(what, partial(step, of_rows))


def structured(streams: Streams, directory: Path) -> Iterator[Pairs]:
    """Each stream writes a text of `SCHEMA`, as the model draws it, and another when it ends."""
    eos, vocab_size = streams.config.eos_token_ids, streams.config.vocab_size
    compiled: Future[Compiled] = Future()
    vocabulary = Vocabulary.of(Tokenizer.from_directory(directory), vocab_size, eos)
    structure = Structure(StructureKind.JSON, json.dumps(SCHEMA))
    compiled.set_result(compile_structure(structure, vocabulary))
    texts: list[list[int]] = [[] for _ in range(streams.number)]
    states = [GrammarState(Grammar(compiled, vocab_size), text, 0) for text in texts]

    def step(temperature: float, masks: bool, number: int) -> float:
        params = SamplingParams(temperature=temperature, seed=number)
        draws = [
            Draw(params, row, grammar=state if masks else None) for row, state in enumerate(states)
        ]
        seconds, results = streams.step(draws)
        for text, result in zip(texts, results if masks else (), strict=False):
            assert isinstance(result, tuple), result
            text += result
            if text[-1] in eos:
                text.clear()
        return seconds

    for what, temperature in (("greedy", 0.0), ("temperature", 0.8)):
        plain, masked = (partial(step, temperature, masks) for masks in (False, True))
        yield streams.pairs(what, masked, plain)
