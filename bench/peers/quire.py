"""Quire behind the peers' interface: `bench/engine.py` for its engine, `quire serve` to serve."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.peers.peer import (
    Command,
    Dtype,
    EngineRun,
    Figure,
    Kind,
    PeerFailed,
    ServerOptions,
    json_lines,
    output_of,
)


class Quire:
    """`arguments` are added to `quire serve`, such as `--cpus 0-1`."""

    name = "quire"
    formats: Mapping[Dtype, str] = {
        "bfloat16": "bf16",
        "int8": "int8",
        "int4": "int4 by 64",
    }
    is_ready = True

    def __init__(self, arguments: tuple[str, ...] = ()) -> None:
        self._arguments = arguments

    def setup(self) -> None:
        """It runs from this checkout."""

    def prepare(self, checkpoint: Path, dtype: Dtype) -> Path:
        return checkpoint

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        shape = ("--prompt", str(run.prompt), "--tokens", str(run.tokens))
        common = ("--model", str(model), *_quantize(dtype), "--rounds", str(run.repeats))
        return [
            *_bench("decode", ("--streams", run.decode, shape), common, run.threads),
            *_bench("prefill", ("--tokens", run.prefill, ()), common, run.threads),
        ]

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        """A gateway on `options.port`; gRPC, not HTTP. Its workers divide the CPUs themselves."""
        flags = {
            "--model": model,
            "--prefill": 1,
            "--decode": 1,
            "--dtype": "bfloat16",
            # as much as vLLM and OpenVINO get
            "--pool-memory": "4GiB",
            "--grpc-port": options.port,
            "--http-port": 0,
            "--max-num-seqs": options.max_num_seqs,
            "--max-model-len": options.max_model_len,
            "--log-level": "warning",
        }
        words = (str(word) for flag in flags.items() for word in flag)
        program = str(Path(sys.executable).parent / "quire")
        return Command((program, "serve", *words, *_quantize(dtype), *self._arguments))


def _quantize(dtype: Dtype) -> tuple[str, ...]:
    return () if dtype == "bfloat16" else ("--quantize", dtype)


def _bench(
    kind: Kind,
    asked: tuple[str, tuple[int, ...], tuple[str, ...]],
    common: tuple[str, ...],
    threads: int,
) -> list[Figure]:
    """The best rate of each size, a thread bound to each CPU as in a worker. PeerFailed: an error,
    or figures missing."""
    option, sizes, shape = asked
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < threads:
        raise PeerFailed(f"{threads} threads on {len(usable)} CPUs")
    words = (*(option, *map(str, sizes), *shape), *common, "--cpus", *map(str, usable[:threads]))
    command = Command((sys.executable, "-m", "bench.engine", kind, "--json", *words))
    rates = [float(line["highest"]) for line in json_lines(output_of(command))] if sizes else []
    if len(rates) != len(sizes):
        raise PeerFailed(f"{len(rates)} figures for {sizes}: {' '.join(command.arguments)}")
    return [Figure(kind, size, rate) for size, rate in zip(sizes, rates, strict=True)]
