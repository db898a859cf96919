"""Times speculative decoding where a text repeats itself and where it never does.

    python -m bench.speculation [--shape small] [--streams 1 8] [--tokens 512] [--rounds 3]
    python -m bench.speculation --draft-layers 1 --shape medium

Two `quire.LLM` in this process, one with drafts and one without, decode the same requests in turn,
on random weights. Their tokens have to be equal. Drafts come from prompt lookup, or with
`--draft-layers` from a model that has so many first layers of the target, its embedding and its
head. Texts:

    repeats   a checkpoint whose greedy text goes round in a loop (`bench.make_checkpoint`). Its
              next token follows from the last one, so that its first layers often propose the same
    edits     the same at a temperature that leaves the loop now and then
    easy      the same as repeats, with layers that change so little that the first ones nearly
              always propose the same
    nothing   draws at temperature 1, with a draft at every step and hardly one right. Prompt
              lookup: from a vocabulary so small that each token is in the prompt. Draft model: of
              other weights

--drafts is the number of drafts of a step; without --draft-layers they come from prompt lookup.
Prints a markdown table: tokens per second of decode without and with drafts, medians of the rounds,
the ratio (lowest and highest round), the same ratio per second of CPU time, which other programs on
the machine change less, and how many of the drafts were accepted.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import in_turn, one_of, options, shown, spread, table_head, table_row
from bench.load import Prompts
from bench.make_checkpoint import SHAPES, make_checkpoint
from quire import LLM, Sampling
from quire.types import Completion

NUM_PROMPT_TOKENS = 600
SMALL_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text that the models write."""

    name: str
    changes: dict[str, Any]
    """The fields of the checkpoint that differ from the shape's."""
    temperature: float
    draft_seed: int = 0
    """The seed of the draft model's weights; the target has 0."""


LOOPS: dict[str, Any] = {"embedding_std": 20.0, "tied": False}
TEXTS = (
    Text("repeats", LOOPS, 0.0),
    Text("edits", LOOPS, 0.07),
    Text("easy", {**LOOPS, "embedding_std": 80.0}, 0.0),
    Text("nothing", {"vocab_size": SMALL_VOCABULARY}, 1.0, draft_seed=1),
)


@dataclass(frozen=True)
class Options:
    shape: str = one_of(SHAPES, "small")
    texts: tuple[str, ...] = one_of([text.name for text in TEXTS], tuple(t.name for t in TEXTS))
    streams: tuple[int, ...] = (1,)
    tokens: int = 512
    rounds: int = 3
    drafts: int = 8
    draft_layers: int = 0
    threads: int = 2
    pool_memory: str = "1GiB"


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answers of one model in a round."""

    answers: Sequence[Completion]
    rate: float
    """Tokens per second after the prompts, which are cached."""
    cpu_rate: float
    """Tokens per second of CPU time, which includes the prompts' last tokens."""

    @property
    def num_accepted(self) -> int:
        return sum(answer.usage.num_accepted_drafts for answer in self.answers)

    @property
    def num_rejected(self) -> int:
        return sum(answer.usage.num_rejected_drafts for answer in self.answers)


@contextmanager
def pair_of_models(text: Text, args: Options) -> Iterator[tuple[LLM, LLM]]:
    """Without drafts, and with."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model", SHAPES[args.shape], **text.changes)
        settings: dict[str, Any] = {
            "pool_memory": args.pool_memory,
            "threads": args.threads,
            "weights_cache": Path(folder) / "cache",
        }
        speculative: dict[str, Any] = {"num_speculative_tokens": args.drafts}
        if args.draft_layers:
            changes = {**text.changes, "num_layers": args.draft_layers, "seed": text.draft_seed}
            draft = make_checkpoint(Path(folder) / "draft", SHAPES[args.shape], **changes)
            speculative |= {"model": str(draft)}
        else:
            speculative |= {"method": "ngram"}
        with (
            LLM(str(model), **settings) as without,
            LLM(str(model), **settings, speculative_config=speculative) as with_drafts,
        ):
            yield without, with_drafts


def decode(llm: LLM, prompts: Sequence[Sequence[int]], sampling: Sampling, _: int) -> Decoded:
    began, cpu_began = time.perf_counter(), time.process_time()
    answers: list[Completion] = llm.generate(prompts, sampling, use_tqdm=False)
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    first = max(answer.usage.time_to_first_token_ms for answer in answers) / 1000
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return Decoded(answers, num_tokens / (elapsed - first), num_tokens / cpu)


def row(text: Text, streams: int, args: Options) -> list[str]:
    """The cells of a text. SystemExit: drafts have changed its tokens."""
    drawing = Prompts(streams, text.changes.get("vocab_size", 2048))
    prompts = [drawing.draw(NUM_PROMPT_TOKENS) for _ in range(streams)]
    sampling = Sampling(
        temperature=text.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True
    )
    with pair_of_models(text, args) as (without, with_drafts):
        for llm in (without, with_drafts):
            llm.generate(prompts, Sampling(max_tokens=8, ignore_eos=True), use_tqdm=False)
        models = {"plain": without, "drafted": with_drafts}
        calls = {name: partial(decode, llm, prompts, sampling) for name, llm in models.items()}
        found = in_turn(calls, args.rounds)
    pairs = list(zip(found["plain"], found["drafted"], strict=True))
    for plain, drafted in pairs:
        if [a.token_ids for a in drafted.answers] != [a.token_ids for a in plain.answers]:
            raise SystemExit(f"{text.name}: other tokens with drafts")
    num_accepted = sum(each.num_accepted for each in found["drafted"])
    num_drafts = num_accepted + sum(each.num_rejected for each in found["drafted"])
    return [
        text.name,
        str(streams),
        *(shown(statistics.median(each.rate for each in rounds)) for rounds in found.values()),
        spread([drafted.rate / plain.rate for plain, drafted in pairs]),
        spread([drafted.cpu_rate / plain.cpu_rate for plain, drafted in pairs]),
        f"{num_accepted:,} of {num_drafts:,}",
    ]


def main() -> None:
    args = options(Options, __doc__)
    header = ("text", "streams", "without, tok/s", "with, tok/s", "ratio", "CPU time", "accepted")
    print(table_head(header))
    for text in TEXTS:
        for streams in args.streams if text.name in args.texts else ():
            print(table_row(row(text, streams, args)), flush=True)


if __name__ == "__main__":
    main()
