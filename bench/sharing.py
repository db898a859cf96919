"""What n samples of one prompt cost: as one request, and as n requests with and without the prefix
cache.

    python -m bench.sharing [--shape small] [--n 16] [--prompt 1024] [--tokens 64] [--rounds 3]

Starts `quire serve` on a model with random weights by itself, its decode worker taking all n at
once. Every measurement has a prompt of its own, of which nothing is cached before; n requests come
at once. Blocks are those held at the most, read from the pool every few milliseconds. Prints a
markdown table of medians over rounds (lowest to highest); ratios are to one request.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.serving.prompts import Prompts
from bench.serving.target import Prompt
from quire.client import AsyncClient
from quire.messages import Request
from quire.types import Sampling
from tests.e2e.deployment import serving

POLL_S = 0.005


@dataclass(frozen=True)
class Run:
    seconds: float
    num_blocks: int


@dataclass
class Peak:
    num_blocks: int = 0


async def measure(client: AsyncClient, requests: Sequence[Request]) -> Run:
    async with _watching(client) as peak:
        began = time.perf_counter()
        await asyncio.gather(*(_read(client, request) for request in requests))
        elapsed_s = time.perf_counter() - began
    return Run(elapsed_s, peak.num_blocks)


async def _read(client: AsyncClient, request: Request) -> None:
    async for _ in client.send(request):
        pass


@asynccontextmanager
async def _watching(client: AsyncClient) -> AsyncIterator[Peak]:
    peak, done = Peak(), asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            held = sum(pool.num_held for pool in await client.pools())
            peak.num_blocks = max(peak.num_blocks, held)
            await asyncio.sleep(POLL_S)

    watcher = asyncio.create_task(watch())
    yield peak
    done.set()
    await watcher


def ways(prompt: Prompt, n: int, tokens: int) -> dict[str, list[Request]]:
    def sampling(seed: int, n: int = 1) -> Sampling:
        return Sampling(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True, n=n)

    return {
        f"one request, n = {n}": [Request(prompt, sampling(0, n), cache_salt="one")],
        f"{n} requests": [
            Request(prompt, sampling(seed), cache_salt="shared") for seed in range(n)
        ],
        f"{n} requests, nothing shared": [
            Request(prompt, sampling(seed), cache_salt=f"own {seed}") for seed in range(n)
        ],
    }


async def compare(address: str, prompts: Prompts, args: argparse.Namespace) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    async with AsyncClient(address) as client:
        for request in ways(prompts.one(args.prompt), args.n, 8).values():
            await measure(client, request)  # warm-up
        for _ in range(args.rounds):
            for what in ways([], args.n, args.tokens):
                requests = ways(prompts.one(args.prompt), args.n, args.tokens)[what]
                runs.setdefault(what, []).append(await measure(client, requests))
    return runs


def table(runs: dict[str, list[Run]]) -> str:
    lines = ["| | seconds | ratio | blocks | ratio |\n|---|---:|---:|---:|---:|"]
    first = next(iter(runs.values()))
    one_s = statistics.median(run.seconds for run in first)
    one_blocks = statistics.median(run.num_blocks for run in first)
    for what, of_it in runs.items():
        seconds = sorted(run.seconds for run in of_it)
        middle_s = statistics.median(seconds)
        blocks = statistics.median(run.num_blocks for run in of_it)
        lines.append(
            f"| {what} | {middle_s:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f}) "
            f"| {middle_s / one_s:.2f} | {blocks:.0f} | {blocks / one_blocks:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool-memory", default="2GiB")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = ("--max-num-seqs", str(args.n), "--pool-memory", args.pool_memory)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", SHAPES[args.shape])
        with serving(checkpoint, Path(folder), *options) as deployment:
            prompts = Prompts.of(checkpoint, args.seed)
            print(table(asyncio.run(compare(deployment.address, prompts, args))))


if __name__ == "__main__":
    main()
