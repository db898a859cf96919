"""The engine alone, without gateway and store: whole steps of a model, and single kernels.

    python -m bench.engine decode --model DIR --streams 1 8 16 --prompt 128 --tokens 128
    python -m bench.engine prefill --model DIR --tokens 512 2048
    python -m bench.engine kernels --model DIR --rows 1 8 16 512
    python -m bench.engine sampling --model DIR --streams 16

Decode: every stream has a prompt of its own in the arena; one step a token for all. Prefill: one
prompt in chunks of --chunk tokens. Tokens per second are medians of --rounds, with the lowest and
the highest. Kernels: the model's linears, and attention of one layer of all layers' memory.
Sampling: what choosing tokens costs of a decode step, by what is asked for.

--floor measures after each figure what the machine can do (`bench.floors`), and says what share of
it was reached; for kernels always. Not for fp32.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import kvops
from bench import floors
from bench.engine_kernels import kernels
from bench.engine_sampling import Rows, sampling
from kvops.native import Lane
from services.engine.batch import Draw, Row, RowResult
from services.engine.models import Model, load_model
from services.engine.runner import Runner
from services.protocol.ticket import SamplingParams

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    streams: int
    tokens_per_s: float
    lowest: float
    highest: float
    worst_step_ms: float
    of_floor: float | None = None
    """Share of the speed that the machine allows."""


class Bench:
    """A model with an arena for `num_rows` rows of `context` positions."""

    def __init__(self, model: Model, num_rows: int, context: int) -> None:
        c = model.config
        self.blocks_per_row = -(-context // BLOCK_SIZE)
        num_blocks = num_rows * self.blocks_per_row
        shape = (num_blocks, c.num_layers, 2, BLOCK_SIZE, c.num_kv_heads, c.head_dim)
        self.runner = Runner(
            model, torch.zeros(shape, dtype=model.dtype), BLOCK_SIZE, kvops.backend("cpu")
        )
        self.vocab_size = c.vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def prompt(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            0, self.vocab_size, (length,), generator=self.generator
        ).tolist()
        return ids

    def table(self, row: int) -> range:
        return range(row * self.blocks_per_row, (row + 1) * self.blocks_per_row)

    def prefill(self, prompt: Sequence[int], chunk: int, row: int = 0) -> int:
        """The first token."""
        drawn: RowResult = ()
        for start in range(0, len(prompt), chunk):
            piece = prompt[start : start + chunk]
            draws = (Draw(GREEDY, 0),) if start + chunk >= len(prompt) else ()
            (drawn,) = self.runner.run([Row(piece, start, self.table(row), draws=draws)])
        assert isinstance(drawn, tuple)
        return drawn[0]

    def decode(self, tokens: list[int], start: int, num_steps: int) -> Iterator[float]:
        """Seconds of each step, all rows at the same position."""
        for position in range(start, start + num_steps):
            rows = [
                Row([token], position, self.table(row), draws=(Draw(GREEDY, 0),))
                for row, token in enumerate(tokens)
            ]
            began = time.perf_counter()
            drawn = self.runner.run(rows)
            tokens = [token for one in drawn if isinstance(one, tuple) for token in one]
            yield time.perf_counter() - began


def decode(model: Model, streams: int, prompt: int, tokens: int, rounds: int) -> Result:
    bench = Bench(model, streams, prompt + tokens)
    first = [bench.prefill(bench.prompt(prompt), 512, row) for row in range(streams)]
    speeds, worst = [], 0.0
    for _ in range(rounds):
        steps = list(bench.decode(first, prompt, tokens))
        speeds.append(streams * len(steps) / sum(steps))
        worst = max(worst, *steps)
    return _result("decode", streams, speeds, worst)


def prefill(model: Model, tokens: int, chunk: int, rounds: int) -> Result:
    bench = Bench(model, 1, tokens)
    speeds, worst = [], 0.0
    bench.prefill(bench.prompt(tokens), chunk)
    for _ in range(rounds):
        prompt = bench.prompt(tokens)
        began = time.perf_counter()
        bench.prefill(prompt, chunk)
        took = time.perf_counter() - began
        speeds.append(tokens / took)
        worst = max(worst, took)
    return _result(f"prefill {tokens}", 1, speeds, worst)


def _result(what: str, streams: int, speeds: Sequence[float], worst_s: float) -> Result:
    median = statistics.median(speeds)
    return Result(what, streams, median, min(speeds), max(speeds), 1000 * worst_s)


def with_floor(result: Result, work: floors.Work, rates: floors.Rates, tokens: int) -> Result:
    """`work` of so many tokens."""
    return replace(result, of_floor=result.tokens_per_s * work.floor_s(rates) / tokens)


def load(args: argparse.Namespace) -> Model:
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    backend = kvops.backend(args.backend)
    if backend.native is not None:
        backend.native.assign([Lane(cpu) for cpu in args.cpus] or [Lane()] * args.threads)
    return load_model(args.model, dtype, backend, quantize=args.quantize, cache=args.cache)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", type=Path, required=True)
    common.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    common.add_argument("--quantize", choices=("int8", "int4", "int4-32", "int4-128"))
    common.add_argument("--backend", default="cpu", choices=kvops.BACKENDS)
    common.add_argument("--threads", type=int, default=os.cpu_count())
    common.add_argument("--cpus", type=int, nargs="*", default=[], help="pin a thread to each")
    common.add_argument("--cache", type=Path, default=Path("~/.cache/quire").expanduser())
    common.add_argument("--rounds", type=int, default=3)
    common.add_argument("--floor", action="store_true", help="measure what is possible, too")
    common.add_argument("--json", action="store_true")
    one = commands.add_parser("decode", parents=[common])
    one.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    one.add_argument("--prompt", type=int, default=128)
    one.add_argument("--tokens", type=int, default=128)
    two = commands.add_parser("prefill", parents=[common])
    two.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    two.add_argument("--chunk", type=int, default=512)
    three = commands.add_parser("kernels", parents=[common])
    three.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 512])
    three.add_argument("--context", type=int, default=192, help="positions of a decoding row")
    three.add_argument("--shared", type=int, default=0, help="of them, in blocks of all rows")
    four = commands.add_parser("sampling", parents=[common])
    four.add_argument("--streams", type=int, nargs="+", default=[16])
    four.add_argument("--context", type=int, default=256, help="tokens of a row, half generated")
    return parser


def results(args: argparse.Namespace, model: Model) -> Iterator[tuple[Result, floors.Work, int]]:
    """Each with its work, and the tokens that this work is for."""
    if args.command == "decode":
        for streams in args.streams:
            result = decode(model, streams, args.prompt, args.tokens, args.rounds)
            context = args.prompt + args.tokens / 2
            yield result, floors.decode_step(model.config, streams, context, args.quantize), streams
    else:
        for tokens in args.tokens:
            result = prefill(model, tokens, args.chunk, args.rounds)
            yield result, floors.prefill_of(model.config, tokens, args.quantize), tokens


def show(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)), flush=True)
        return
    share = "" if result.of_floor is None else f", {result.of_floor:.0%} of what is possible"
    rate = f"{result.tokens_per_s:>9.1f} tok/s ({result.lowest:.1f} .. {result.highest:.1f})"
    worst = f"worst {result.worst_step_ms:.1f} ms"
    print(f"{result.what:<14}{result.streams:>4} streams {rate}, {worst}{share}", flush=True)


def main() -> None:
    args = parser().parse_args()
    model = load(args)
    num_threads = len(args.cpus) or args.threads
    if args.command == "kernels":
        for line in kernels(model.config, args, num_threads):
            print(line, flush=True)
        return
    if args.command == "sampling":
        for streams in args.streams:
            bench = Bench(model, streams, args.context)
            rows = Rows(model, bench.runner, bench.table, streams, args.context)
            for figure in sampling(rows, rounds=10 * args.rounds):
                print(figure, flush=True)
        return
    for result, work, tokens in results(args, model):
        if args.floor:
            result = with_floor(result, work, floors.measure(num_threads), tokens)
        show(result, args.json)


if __name__ == "__main__":
    main()
