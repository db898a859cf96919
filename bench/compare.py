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

import argparse
import asyncio
import math
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

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

Options = argparse.Namespace
ENGINE = ("decode", "prefill")
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


def engine_rows(who: Contestant, model: Path, options: Options) -> Iterator[tuple[Row, float]]:
    run = EngineRun(
        decode=tuple(options.streams) if "decode" in options.only else (),
        prefill=tuple(options.prefill) if "prefill" in options.only else (),
        prompt=options.prompt,
        threads=options.threads,
        repeats=options.repeats,
    )
    for figure in who.peer.measure(model, who.dtype, run):
        what = f"{figure.size} streams" if figure.kind == "decode" else f"{figure.size} tokens"
        yield Row(f"engine, {figure.kind} of {what}: tok/s", "higher"), figure.tokens_per_s


async def serving_rows(
    who: Contestant, model: Path, prompts: Prompts, options: Options
) -> list[tuple[Row, float]]:
    server = ServerOptions(options.port, options.threads)
    async with running(who.peer, model, who.dtype, server) as served:
        rows = [(Row("server: seconds to the first token", "lower"), served.ready_s)]
        # Sizes that were never seen are prepared at first use: not while it is measured.
        await closed(served.target, prompts, max(options.streams), 64, 8)
        async for kind, measurement in scenarios(served.target, prompts, options):
            if kind != "poisson" and measurement.values.get("failed"):
                raise PeerFailed(f"requests failed: {measurement}")
            rows += [
                (Row(f"{measurement.scenario}: {column}", better), measurement.values[column])
                for column, better in COMPARED[kind].items()
                if math.isfinite(measurement.values[column])
            ]
    return rows


async def scenarios(
    target: Target, prompts: Prompts, options: Options
) -> AsyncIterator[tuple[str, Measurement]]:
    if "closed" in options.only:
        for streams in options.streams:
            yield "closed", await closed(target, prompts, streams, 128, 128)
    if "interference" in options.only:
        yield "interference", await interference(target, prompts, 4, 128, 2048)
    if "prefix" in options.only:
        for measurement in await prefixed(target, prompts, 16, options.tokens):
            yield "prefix", measurement
    if "poisson" in options.only:
        for rate in options.rate:
            yield "poisson", await at_random(target, prompts, rate, options.requests, options.seed)


async def compare(
    contestants: Sequence[Contestant], options: Options, comparison: Comparison
) -> bool:
    """Adds what each round measures; whether nobody failed."""
    whole = True
    model = checkpoint(options.shape)
    for number in range(options.rounds):
        turn = number % len(contestants)
        for who in (*contestants[turn:], *contestants[:turn]):
            print(f"round {number + 1}: {who.name}", file=sys.stderr, flush=True)
            try:
                rows = await one_round(who, model, options.seed + number, options)
            except (PeerFailed, RequestFailed, ValueError) as error:
                print(f"{who.name} failed: {error}", file=sys.stderr, flush=True)
                whole = False
                continue
            for row, value in rows:
                comparison.add(who.name, row, value)
    return whole


async def one_round(
    who: Contestant, model: Path, seed: int, options: Options
) -> list[tuple[Row, float]]:
    own = who.peer.prepare(model, who.dtype)
    rows: list[tuple[Row, float]] = []
    if not set(options.only).isdisjoint(ENGINE):
        rows += engine_rows(who, own, options)
    if not set(options.only).isdisjoint(SERVING):
        rows += await serving_rows(who, own, prompts_of(model, seed), options)
    return rows


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = (*ENGINE, *SERVING)
    result.add_argument("--shape", choices=list(SHAPES), default="small")
    result.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    result.add_argument("--only", choices=kinds, nargs="+", default=kinds)
    result.add_argument(
        "--peers", choices=list(PEERS), nargs="*", help="default: all that have the dtype"
    )
    result.add_argument("--rounds", type=int, default=3)
    result.add_argument("--repeats", type=int, default=2, help="best of, within a round; engine")
    result.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    result.add_argument("--prompt", type=int, default=128, help="tokens in before decode; engine")
    result.add_argument("--prefill", type=int, nargs="+", default=[512, 2048], metavar="TOKENS")
    result.add_argument("--rate", type=float, nargs="+", default=[0.5], help="requests a second")
    result.add_argument("--requests", type=int, default=40, help="for each rate")
    result.add_argument("--tokens", type=int, default=16, help="out, with a shared prefix")
    result.add_argument("--threads", type=int, default=os.cpu_count())
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--port", type=int, default=8150)
    result.add_argument("--quire-arguments", type=shlex.split, default=[], help="for quire serve")
    return result


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
    options = parser().parse_args()
    peers = chosen_peers(options.peers, options.dtype)
    quire = Quire(tuple(options.quire_arguments))
    ours, rivals = Contestant(quire, options.dtype), [Contestant(p, options.dtype) for p in peers]
    contestants = [ours, *rivals]
    comparison = Comparison(ours.name, [rival.name for rival in rivals])
    whole = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        whole = asyncio.run(compare(contestants, options, comparison))
    except KeyboardInterrupt:
        print("interrupted; of the rounds before:", file=sys.stderr)
    print(comparison.table())
    if not whole:
        sys.exit(1)


if __name__ == "__main__":
    main()
