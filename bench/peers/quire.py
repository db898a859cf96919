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
    Peer,
    PeerFailed,
    ServerOptions,
    json_lines,
    output_of,
)


class Quire(Peer):
    """`arguments` are added to `quire serve`, such as `--cpus 0-1`."""

    name = "quire"
    formats: Mapping[Dtype, str] = {
        "bfloat16": "bf16",
        "int8": "int8",
        "int4": "int4 by 64",
    }

    def __init__(self, arguments: tuple[str, ...] = ()) -> None:
        self._arguments = arguments

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        """The best rate of each size, a thread bound to each CPU as in a worker."""
        cpus = tuple(sorted(os.sched_getaffinity(0))[: run.threads])
        if len(cpus) < run.threads:
            raise PeerFailed(f"{run.threads} threads on {len(cpus)} CPUs")
        flags = {"--model": model, **_quantize(dtype), "--rounds": run.repeats, "--cpus": cpus}
        streams = {"--streams": run.decode, "--prompt": run.prompt, "--tokens": run.tokens}
        return [
            *_bench("decode", run.decode, {**flags, **streams}),
            *_bench("prefill", run.prefill, {**flags, "--tokens": run.prefill}),
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
            **_quantize(dtype),
        }
        program = Path(sys.executable).parent / "quire"
        return Command.of(program, "serve", flags, *self._arguments)


def _quantize(dtype: Dtype) -> dict[str, object]:
    return {} if dtype == "bfloat16" else {"--quantize": dtype}


def _bench(kind: Kind, sizes: tuple[int, ...], flags: dict[str, object]) -> list[Figure]:
    """PeerFailed: an error, or figures missing."""
    command = Command.of(sys.executable, "-m", "bench.engine", kind, "--json", flags)
    rates = [float(line["highest"]) for line in json_lines(output_of(command))] if sizes else []
    if len(rates) != len(sizes):
        raise PeerFailed(f"{len(rates)} figures for {sizes}: {' '.join(command.arguments)}")
    return [Figure(kind, size, rate) for size, rate in zip(sizes, rates, strict=True)]
