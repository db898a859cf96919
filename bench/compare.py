"""Quire and its peers, in turn, on one checkpoint: the table of `docs/benchmarks.md`.

    python -m bench.peers setup
    python -m bench.compare --shape 0.6b --rounds 3
    python -m bench.compare --shape small --only decode prefill --streams 1 8 16 --dtype int8
    python -m bench.compare --shape 0.6b --only decode prefill --dtype int4
    python -m bench.compare --only closed interference --peers vllm openvino

Each contestant runs alone. A round is one process of each engine and one server of each; rounds
alternate who begins, and draw other prompts. Cells are medians over the rounds with the lowest and
the highest, ratios are Quire's median by the best peer's. The header names each format: `int4 by
64` has a scale for each group of 64. A contestant that fails is left out of the table, its error is
printed, and the exit status is 1. Interrupted or terminated, it shows what it has measured by then.

decode, prefill     the engine alone, without a server
Loads on a server; Quire over gRPC, peers over HTTP; greedy, no end of sequence, random token ids:

closed          N streams, each of 128 tokens in and 128 out
poisson         prompts arrive at random times; goodput counts requests with a first token within
                5 s and every gap below 150 ms
prefix          requests that share a prefix which nobody has computed (cold), then others (warm)
interference    streams decode while a long prompt arrives

`decode tok/s` is the rate while all streams decode, `tok/s` is over the whole time. Without peers
(`--peers`), Quire is measured alone.
"""

import asyncio
import math
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import one_of, options, rotated
from bench.load import Prompts, RequestFailed, Target
from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.peers import PEERS
from bench.peers.environment import DIRECTORY
from bench.peers.peer import Dtype, EngineRun, Peer, PeerFailed, ServerOptions
from bench.peers.quire import Quire
from bench.serving.comparison import Better, Comparison, Row
from bench.serving.scenarios import (
    Measurement,
    at_random,
    closed,
    interference,
    prefixed,
    prompts_of,
)
from bench.serving.server import running

ENGINE = ("decode", "prefill")
NUM_CPUS = os.cpu_count() or 1
SERVING = ("closed", "poisson", "prefix", "interference")
COMPARED: dict[str, dict[str, Better]] = {
    "closed": {
        "decode tok/s": "higher",
        "tok/s": "higher",
        "ttft p50 ms": "lower",
        "gap p99 ms": "lower",
    },
    "interference": {"worst / quiet": "lower", "worst gap ms": "lower", "ttft p50 ms": "lower"},
    "prefix": {"seconds": "lower"},
    "poisson": {
        "goodput req/s": "higher",
        "good %": "higher",
        "failed": "lower",
        "ttft p99 ms": "lower",
        "gap p99 ms": "lower",
    },
}
"""The figures that are compared. Only under Poisson's load may requests fail:
they are sent whether the server keeps up or not."""


@dataclass(frozen=True)
class Options:
    """`repeats` is for the engine alone: the best of so many counts within a round. `prompt` tokens
    come before decode. `rate` is in requests a second, `tokens` come out with a shared prefix."""

    shape: str = one_of(SHAPES, "small")
    dtype: Dtype = "bfloat16"
    only: tuple[str, ...] = one_of((*ENGINE, *SERVING), (*ENGINE, *SERVING))
    peers: tuple[str, ...] | None = one_of(PEERS, None)
    """None for all that have the dtype."""
    rounds: int = 3
    repeats: int = 2
    streams: tuple[int, ...] = (1, 8, 16)
    prompt: int = 128
    prefill: tuple[int, ...] = (512, 2048)
    rate: tuple[float, ...] = (0.5,)
    requests: int = 40
    tokens: int = 16
    threads: int = NUM_CPUS
    seed: int = 0
    port: int = 8150
    quire_arguments: str = ""
    """More flags of `quire serve`."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """Quire or a peer, with weights of one dtype."""

    peer: Peer
    dtype: Dtype

    @property
    def name(self) -> str:
        """As in the table's header, such as `llama.cpp (Q4_0)`."""
        return f"{self.peer.name} ({self.peer.formats[self.dtype]})"


def checkpoint(shape: str) -> Path:
    """The shape's checkpoint, made once. A shape that changed has another name."""
    spec = SHAPES[shape]
    directory = DIRECTORY / "checkpoints" / f"{shape}-{spec.fingerprint}"
    if not directory.exists():
        unfinished = directory.with_name(f"{directory.name}-unfinished")
        make_checkpoint(unfinished, spec).rename(directory)
    return directory


def engine_rows(who: Contestant, model: Path, asked: Options) -> Iterator[tuple[Row, float]]:
    run = EngineRun(
        decode=asked.streams if "decode" in asked.only else (),
        prefill=asked.prefill if "prefill" in asked.only else (),
        prompt=asked.prompt,
        threads=asked.threads,
        repeats=asked.repeats,
    )
    for figure in who.peer.measure(model, who.dtype, run):
        what = f"{figure.size} streams" if figure.kind == "decode" else f"{figure.size} tokens"
        yield Row(f"engine, {figure.kind} of {what}: tok/s", "higher"), figure.tokens_per_s


async def serving_rows(
    who: Contestant, model: Path, prompts: Prompts, asked: Options
) -> list[tuple[Row, float]]:
    server = ServerOptions(asked.port, asked.threads)
    async with running(who.peer, model, who.dtype, server) as served:
        rows = [(Row("server: seconds to the first token", "lower"), served.ready_s)]
        # Sizes that were never seen are prepared at first use: not while it is measured.
        await closed(served.target, prompts, max(asked.streams), 64, 8)
        async for kind, measurement in scenarios(served.target, prompts, asked):
            if kind != "poisson" and measurement.values.get("failed"):
                raise PeerFailed(f"requests failed: {measurement}")
            rows += [
                (Row(f"{measurement.scenario}: {column}", better), measurement.values[column])
                for column, better in COMPARED[kind].items()
                if math.isfinite(measurement.values[column])
            ]
    return rows


async def scenarios(
    target: Target, prompts: Prompts, asked: Options
) -> AsyncIterator[tuple[str, Measurement]]:
    if "closed" in asked.only:
        for streams in asked.streams:
            yield "closed", await closed(target, prompts, streams, 128, 128)
    if "interference" in asked.only:
        yield "interference", await interference(target, prompts, 4, 128, 2048)
    if "prefix" in asked.only:
        for measurement in await prefixed(target, prompts, 16, asked.tokens):
            yield "prefix", measurement
    if "poisson" in asked.only:
        for rate in asked.rate:
            yield "poisson", await at_random(target, prompts, rate, asked.requests, asked.seed)


async def compare(
    contestants: Sequence[Contestant], asked: Options, comparison: Comparison
) -> bool:
    """Adds what each round measures; whether nobody failed."""
    whole = True
    model = checkpoint(asked.shape)
    for number in range(asked.rounds):
        for who in rotated(contestants, number):
            print(f"round {number + 1}: {who.name}", file=sys.stderr, flush=True)
            try:
                rows = await one_round(who, model, asked.seed + number, asked)
            except (PeerFailed, RequestFailed, ValueError) as error:
                print(f"{who.name} failed: {error}", file=sys.stderr, flush=True)
                whole = False
                continue
            for row, value in rows:
                comparison.add(who.name, row, value)
    return whole


async def one_round(
    who: Contestant, model: Path, seed: int, asked: Options
) -> list[tuple[Row, float]]:
    own = who.peer.prepare(model, who.dtype)
    rows: list[tuple[Row, float]] = []
    if not set(asked.only).isdisjoint(ENGINE):
        rows += engine_rows(who, own, asked)
    if not set(asked.only).isdisjoint(SERVING):
        rows += await serving_rows(who, own, prompts_of(model, seed), asked)
    return rows


def chosen_peers(names: Sequence[str] | None, dtype: Dtype) -> list[Peer]:
    """The named peers, or all that have the dtype. SystemExit: a named one cannot take part."""
    if names is None:
        names = [name for name, peer in PEERS.items() if dtype in peer.formats]
    peers = [PEERS[name] for name in names]
    if unable := [peer.name for peer in peers if dtype not in peer.formats]:
        raise SystemExit(f"no {dtype} weights: {' '.join(unable)}; leave them out of --peers")
    if missing := [peer.name for peer in peers if not peer.is_ready]:
        raise SystemExit(f"not set up: python -m bench.peers setup {' '.join(missing)}")
    return peers


def main() -> None:
    asked = options(Options, __doc__)
    peers = chosen_peers(asked.peers, asked.dtype)
    quire = Quire(tuple(shlex.split(asked.quire_arguments)))
    ours, rivals = Contestant(quire, asked.dtype), [Contestant(p, asked.dtype) for p in peers]
    contestants = [ours, *rivals]
    comparison = Comparison(ours.name, [rival.name for rival in rivals])
    whole = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        whole = asyncio.run(compare(contestants, asked, comparison))
    except KeyboardInterrupt:
        print("interrupted; of the rounds before:", file=sys.stderr)
    print(comparison.table())
    if not whole:
        sys.exit(1)


if __name__ == "__main__":
    main()
