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
Kernels: the model's linears, and attention of one layer of all layers' memory, over --context
positions, of which all rows share the first --shared; with --floor, a plain read and a linear from
L2 in the same rounds.
Sampling, structured, adapters: a decode step with other sampling parameters, with structured
output, or with LoRA adapters, beside a greedy step without.
--cpus pins a thread to each of these CPUs, in the place of --threads.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import kvops
from bench.engine_kernels import kernels, weight_bytes
from bench.engine_pairs import Streams, adapters, sampling, structured
from bench.harness import one_of, options
from bench.steps import Steps
from kvops.native import Lane
from services.engine.models import load_model

CACHE = Path.home() / ".cache/quire"
COMMANDS = ("decode", "prefill", "kernels", "sampling", "structured", "adapters")


@dataclass(frozen=True)
class Options:
    model: Path
    command: str = one_of(COMMANDS, first=True)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantize: Literal["int8", "int4", "int4-32", "int4-128"] | None = None
    kv_dtype: Literal["auto", "int8"] = "auto"
    backend: str = one_of(kvops.BACKENDS, "cpu")
    threads: int = os.cpu_count() or 1
    cpus: tuple[int, ...] = ()
    cache: Path = CACHE
    rounds: int = 3
    json: bool = False
    streams: tuple[int, ...] = (1, 8, 16)
    prompt: int = 128
    tokens: tuple[int, ...] = ()
    """Without any, 128 for decode, and 512 and 2,048 for prefill."""
    chunk: int = 512
    rows: tuple[int, ...] = (1, 8, 16, 512)
    floor: bool = False
    context: int = 256
    shared: int = 0
    rank: int = 16


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    streams: int
    tokens_per_s: float
    lowest: float
    highest: float
    worst_step_ms: float
    bytes_per_s: float | None = None
    """The bytes of weights and KV that decode reads in a second, each once a step; None for prefill
    and for a GGUF file, whose tensors have formats of their own."""

    @classmethod
    def of(cls, what: str, streams: int, speeds: Sequence[float], worst_s: float) -> "Result":
        median = statistics.median(speeds)
        return cls(what, streams, median, min(speeds), max(speeds), 1000 * worst_s)

    def __str__(self) -> str:
        rate = f"{self.tokens_per_s:>9.1f} tok/s ({self.lowest:.1f} .. {self.highest:.1f})"
        line = f"{self.what:<14}{self.streams:>4} streams {rate}, worst {self.worst_step_ms:.1f} ms"
        return line if self.bytes_per_s is None else f"{line}, {self.bytes_per_s / 1e9:.1f} GB/s"


def decode(steps: Steps, streams: int, args: Options) -> Result:
    prompt, tokens = args.prompt, args.tokens[0] if args.tokens else 128
    steps.begin(streams, prompt + tokens, 0.0, args.kv_dtype == "int8")
    draw = torch.Generator().manual_seed(0)
    firsts = [steps.prefill(row, random_prompt(steps, prompt, draw), 512) for row in range(streams)]
    speeds, worst_s = [], 0.0
    for _ in range(args.rounds):
        drawn, seconds = firsts, list[float]()
        for position in range(prompt, prompt + tokens):
            last = [result for result in drawn if isinstance(result, tuple)]
            rows = [steps.row(row, tokens, position) for row, tokens in enumerate(last)]
            took_s, drawn = steps.timed(rows)
            seconds.append(took_s)
        speeds.append(streams * len(seconds) / sum(seconds))
        worst_s = max(worst_s, *seconds)
    result = Result.of("decode", streams, speeds, worst_s)
    if args.model.is_file():
        return result
    read = weight_bytes(steps.model.config, args.quantize)
    read += streams * steps.position_bytes * (prompt + tokens // 2)
    return replace(result, bytes_per_s=result.tokens_per_s / streams * read)


def prefill(steps: Steps, length: int, args: Options) -> Result:
    steps.begin(1, length, 0.0, args.kv_dtype == "int8")
    draw, seconds = torch.Generator().manual_seed(0), list[float]()
    for _ in range(args.rounds + 1):  # the first one finds cold caches
        prompt = random_prompt(steps, length, draw)
        began = time.perf_counter()
        steps.prefill(0, prompt, args.chunk)
        seconds.append(time.perf_counter() - began)
    speeds = [length / took_s for took_s in seconds[1:]]
    return Result.of(f"prefill {length}", 1, speeds, max(seconds[1:]))


def random_prompt(steps: Steps, length: int, draw: torch.Generator) -> list[int]:
    vocab_size = steps.model.config.vocab_size
    ids: list[int] = torch.randint(0, vocab_size, (length,), generator=draw).tolist()
    return ids


def figures(args: Options) -> Iterator[Any]:
    """Yields the measurements of the command; the text of each is a line."""
    backend = kvops.backend(args.backend)
    if backend.native is not None:
        backend.native.assign([Lane(cpu) for cpu in args.cpus] or [Lane()] * args.threads)
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    model = load_model(args.model, dtype, backend, quantize=args.quantize, cache=args.cache)
    steps = Steps(model, backend)
    if args.command == "kernels":
        yield from kernels(model.config, args)
    elif args.command == "prefill":
        for length in args.tokens or (512, 2048):
            yield prefill(steps, length, args)
    elif args.command == "decode":
        for number in args.streams:
            yield decode(steps, number, args)
    else:
        for number in args.streams:
            steps.begin(number, args.context, 0.0, args.kv_dtype == "int8")
            streams = Streams(steps, number, args.context, 10 * args.rounds)
            if args.command == "sampling":
                yield from sampling(streams)
            elif args.command == "adapters":
                yield from adapters(streams, args.model, args.rank)
            else:
                yield from structured(streams, args.model)


def main() -> None:
    args = options(Options, __doc__)
    for figure in figures(args):
        print(json.dumps(asdict(figure)) if args.json else figure, flush=True)


if __name__ == "__main__":
    main()
