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

Prints a markdown table: tokens per second of decode without and with drafts, medians of the rounds,
the ratio (lowest and highest round), the same ratio per second of CPU time, which other programs on
the machine change less, and how many of the drafts were accepted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens per second, and per second of CPU time."""

    without: tuple[float, float]
    with_drafts: tuple[float, float]
    num_drafts: int
    num_accepted: int


@contextmanager
def pair_of_models(text: Text, args: argparse.Namespace) -> Iterator[tuple[LLM, LLM]]:
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


def decode(
    llm: LLM, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[tuple[float, float], list[Completion]]:
    """Tokens per second after the prompts, which are cached, and the answers. CPU time includes the
    prompts' last tokens."""
    began, cpu_began = time.perf_counter(), time.process_time()
    answers: list[Completion] = llm.generate(prompts, sampling, use_tqdm=False)
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    first = max(answer.usage.time_to_first_token_ms for answer in answers) / 1000
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return (num_tokens / (elapsed - first), num_tokens / cpu), answers


def measure(text: Text, streams: int, args: argparse.Namespace) -> list[Pair]:
    drawing = Prompts(streams, text.changes.get("vocab_size", 2048))
    prompts = [drawing.draw(NUM_PROMPT_TOKENS) for _ in range(streams)]
    sampling = Sampling(
        temperature=text.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True
    )
    pairs = []
    with pair_of_models(text, args) as (without, with_drafts):
        for llm in (without, with_drafts):
            llm.generate(prompts, Sampling(max_tokens=8, ignore_eos=True), use_tqdm=False)
        for _ in range(args.rounds):
            plain, expected = decode(without, prompts, sampling)
            drafted, answers = decode(with_drafts, prompts, sampling)
            if [one.token_ids for one in answers] != [one.token_ids for one in expected]:
                raise SystemExit(f"{text.name}: other tokens with drafts")
            num_accepted = sum(one.usage.num_accepted_drafts for one in answers)
            num_rejected = sum(one.usage.num_rejected_drafts for one in answers)
            pairs.append(Pair(plain, drafted, num_accepted + num_rejected, num_accepted))
    return pairs


def row(text: Text, streams: int, pairs: Sequence[Pair]) -> str:
    ratios = [
        sorted(pair.with_drafts[kind] / pair.without[kind] for pair in pairs) for kind in (0, 1)
    ]
    cells = [
        text.name,
        str(streams),
        f"{statistics.median(pair.without[0] for pair in pairs):,.0f}",
        f"{statistics.median(pair.with_drafts[0] for pair in pairs):,.0f}",
        *(f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in ratios),
        f"{sum(p.num_accepted for p in pairs):,} of {sum(p.num_drafts for p in pairs):,}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--texts", nargs="+", choices=[text.name for text in TEXTS], default=None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=0, help="0: prompt lookup")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pool-memory", default="1GiB")
    args = parser.parse_args()
    print("| text | streams | without, tok/s | with, tok/s | ratio | CPU time | accepted |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for text in TEXTS:
        for streams in args.streams if text.name in (args.texts or [text.name]) else ():
            print(row(text, streams, measure(text, streams, args)), flush=True)


if __name__ == "__main__":
    main()
