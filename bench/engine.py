"""The engine alone, without gateway and store: whole steps of a model, and single kernels.

    python -m bench.engine decode --model DIR --streams 1 8 16 --prompt 128 --tokens 128
    python -m bench.engine prefill --model DIR --tokens 512 2048
    python -m bench.engine kernels --model DIR --rows 1 8 16 512
    python -m bench.engine sampling --model DIR --streams 16
    python -m bench.engine structured --model DIR --streams 16
    python -m bench.engine adapters --model DIR --streams 16 --rank 16

Decode: every stream has a prompt of its own in the arena; one step a token for all. Prefill: one
prompt in chunks of --chunk tokens. Tokens per second are medians of --rounds, with the lowest and
the highest; beside them, the bytes of weights and KV that decode reads in a second.
Kernels: the model's linears, and attention of one layer of all layers' memory; with --floor, a
plain read and a linear from L2 in the same rounds.
Sampling, structured, adapters: a decode step with other sampling parameters, with structured
output, or with LoRA adapters, beside a greedy step without.
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
from bench.engine_kernels import kernels, weight_bytes
from bench.engine_pairs import GREEDY, Streams, adapters, sampling, structured
from kvops import int8_kv
from kvops.native import Lane
from services.engine.batch import Draw, Row, RowResult
from services.engine.models import Model, load_model
from services.engine.runner import Runner

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    streams: int
    tokens_per_s: float
    lowest: float
    highest: float
    worst_step_ms: float
    bytes_per_s: float | None = None
    """The bytes of weights and KV that decode reads in a second, each once a step; None for a GGUF
    file, whose tensors have formats of their own."""


class Bench:
    """A model with an arena for `num_rows` rows of `context` positions."""

    def __init__(self, model: Model, num_rows: int, context: int, kv_in_int8: bool) -> None:
        c = model.config
        self.blocks_per_row = -(-context // BLOCK_SIZE)
        num_blocks = num_rows * self.blocks_per_row
        shape = (num_blocks, c.num_layers, 2, BLOCK_SIZE, c.num_kv_heads, c.head_dim)
        arena = torch.zeros(shape, dtype=model.dtype)
        if kv_in_int8:
            arena = torch.zeros(*shape[:-1], c.head_dim + int8_kv.SCALE_BYTES, dtype=torch.int8)
        self._block_bytes = arena[0].nbytes
        self.runner = Runner(model, arena, BLOCK_SIZE, kvops.backend("cpu"))
        self.vocab_size = c.vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def prompt(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            0, self.vocab_size, (length,), generator=self.generator
        ).tolist()
        return ids

    def kv_bytes(self, num_positions: int) -> int:
        return self._block_bytes // BLOCK_SIZE * num_positions

    def table(self, row: int) -> range:
        return range(row * self.blocks_per_row, (row + 1) * self.blocks_per_row)

    def prefill(self, prompt: Sequence[int], chunk: int, row: int = 0) -> int:
        """The first token."""
        drawn: RowResult = ()
        for start in range(0, len(prompt), chunk):
            piece = prompt[start : start + chunk]
            draws = (Draw(GREEDY, 0),) if start + chunk >= len(prompt) else ()
            rows = [Row(piece, start, self.table(row), draws=draws)]
            (drawn,) = self.runner.launch(rows).result()
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
            drawn = self.runner.launch(rows).result()
            tokens = [token for one in drawn if isinstance(one, tuple) for token in one]
            yield time.perf_counter() - began


def decode(model: Model, streams: int, args: argparse.Namespace) -> Result:
    prompt, tokens = args.prompt, args.tokens
    bench = Bench(model, streams, prompt + tokens, args.kv_dtype == "int8")
    first = [bench.prefill(bench.prompt(prompt), 512, row) for row in range(streams)]
    speeds, worst = [], 0.0
    for _ in range(args.rounds):
        steps = list(bench.decode(first, prompt, tokens))
        speeds.append(streams * len(steps) / sum(steps))
        worst = max(worst, *steps)
    result = _result("decode", streams, speeds, worst)
    if Path(args.model).is_file():
        return result
    step_bytes = weight_bytes(model.config, args.quantize) + streams * bench.kv_bytes(
        prompt + tokens // 2
    )
    rate = result.tokens_per_s / streams * step_bytes
    return replace(result, bytes_per_s=rate)


def prefill(model: Model, tokens: int, args: argparse.Namespace) -> Result:
    bench = Bench(model, 1, tokens, args.kv_dtype == "int8")
    speeds, worst = [], 0.0
    bench.prefill(bench.prompt(tokens), args.chunk)
    for _ in range(args.rounds):
        prompt = bench.prompt(tokens)
        began = time.perf_counter()
        bench.prefill(prompt, args.chunk)
        took = time.perf_counter() - began
        speeds.append(tokens / took)
        worst = max(worst, took)
    return _result(f"prefill {tokens}", 1, speeds, worst)


def _result(what: str, streams: int, speeds: Sequence[float], worst_s: float) -> Result:
    median = statistics.median(speeds)
    return Result(what, streams, median, min(speeds), max(speeds), 1000 * worst_s)


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
    common.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
    common.add_argument("--backend", default="cpu", choices=kvops.BACKENDS)
    common.add_argument("--threads", type=int, default=os.cpu_count())
    common.add_argument("--cpus", type=int, nargs="*", default=[], help="pin a thread to each")
    common.add_argument("--cache", type=Path, default=Path("~/.cache/quire").expanduser())
    common.add_argument("--rounds", type=int, default=3)
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
    three.add_argument("--floor", action="store_true", help="what is possible at that moment")
    three.add_argument("--context", type=int, default=192, help="positions of a decoding row")
    three.add_argument("--shared", type=int, default=0, help="of them, in blocks of all rows")
    for name in ("sampling", "structured", "adapters"):
        four = commands.add_parser(name, parents=[common])
        four.add_argument("--streams", type=int, nargs="+", default=[16])
        four.add_argument("--context", type=int, default=256, help="tokens of a row")
    commands.choices["adapters"].add_argument("--rank", type=int, default=16)
    return parser


def show(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)), flush=True)
        return
    rate = f"{result.tokens_per_s:>9.1f} tok/s ({result.lowest:.1f} .. {result.highest:.1f})"
    line = (
        f"{result.what:<14}{result.streams:>4} streams {rate}, worst {result.worst_step_ms:.1f} ms"
    )
    if result.bytes_per_s is not None:
        line += f", {result.bytes_per_s / 1e9:.1f} GB/s"
    print(line, flush=True)


def decode_steps(model: Model, args: argparse.Namespace) -> Iterator[object]:
    """The measurements beside decode steps, for each number of streams."""
    for streams in args.streams:
        bench = Bench(model, streams, args.context, args.kv_dtype == "int8")
        rounds = 10 * args.rounds
        asked = Streams(bench.runner, bench.table, streams, args.context)
        if args.command == "sampling":
            yield from sampling(model, asked, rounds)
        elif args.command == "adapters":
            yield from adapters(model, asked, args.model, args.rank, rounds)
        else:
            yield from structured(model, asked, args.model, rounds)


def main() -> None:
    args = parser().parse_args()
    model = load(args)
    if args.command == "decode":
        for streams in args.streams:
            show(decode(model, streams, args), args.json)
    elif args.command == "prefill":
        for tokens in args.tokens:
            show(prefill(model, tokens, args), args.json)
    elif args.command == "kernels":
        for line in kernels(model.config, args, len(args.cpus) or args.threads):
            print(line, flush=True)
    else:
        for figure in decode_steps(model, args):
            print(figure, flush=True)


if __name__ == "__main__":
    main()
