"""Measures the cost of several sequences of one prompt: n samples, or the beams of a search, as one
request and as requests of their own with and without the prefix cache.

    python -m bench.sharing [--shape small] [--n 16] [--width 8] [--prompt 1024] [--tokens 64]
                            [--rounds 3]

Starts `quire serve` on a model with random weights by itself, its decode worker taking all at
once. Every measurement has a prompt of its own, of which nothing is cached before. *All at work*:
the sequences share nothing either, but the prompt was computed for each of them before the time
begins, so that all decode together and hold at once what sequences without sharing hold; nothing of
its prefills is in its seconds. Blocks are those held at the most, asked of the pool's ledger every
few milliseconds. Prints markdown tables of medians over rounds (lowest to highest); ratios are to
the first row.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.serving.scenarios import prompts_of
from bench.tables import markdown
from blockstore.redis_store import RedisStore
from quire.async_client import AsyncClient
from quire.bench.prompts import Prompts
from quire.messages import Request
from quire.types import Beam, Prompt, Sampling
from tests.e2e.deployment import Deployment, serving

POLL_S = 0.002


@dataclass(frozen=True)
class Run:
    seconds: float
    num_blocks: int


@dataclass
class Peak:
    num_blocks: int = 0


@dataclass(frozen=True)
class Way:
    """`requests`, all at once. `warm`: their prompts are computed before."""

    requests: Sequence[Request]
    warm: bool = False


@dataclass(frozen=True)
class Pool:
    """The ledger of the deployment's only pool, read beside it."""

    store: RedisStore
    pool_id: str

    async def num_held(self) -> int:
        return (await self.store.stats(self.pool_id)).num_held

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Peak]:
        peak = Peak()

        async def watch() -> None:
            while True:
                peak.num_blocks = max(peak.num_blocks, await self.num_held())
                await asyncio.sleep(POLL_S)

        watcher = asyncio.create_task(watch())
        yield peak
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher

    async def empty(self) -> None:
        """Until the last measurement has let go of all."""
        while True:
            if not await self.num_held():
                return
            await asyncio.sleep(POLL_S)


async def measure(client: AsyncClient, pool: Pool, way: Way) -> Run:
    if way.warm:
        for request in way.requests:
            one_token = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
            await _read(client, replace(request, sampling=one_token))
    await pool.empty()
    async with pool.watched() as peak:
        began = time.perf_counter()
        await asyncio.gather(*(_read(client, request) for request in way.requests))
        elapsed_s = time.perf_counter() - began
    return Run(elapsed_s, peak.num_blocks)


async def _read(client: AsyncClient, request: Request) -> None:
    async for _ in client.send(request):
        pass


def ways_to_sample(prompt: Prompt, n: int, tokens: int) -> dict[str, Way]:
    sampling = Sampling(temperature=1.0, seed=0, max_tokens=tokens, ignore_eos=True)
    together = Request(prompt, replace(sampling, n=n), cache_salt="one")
    return {f"one request, n = {n}": Way([together]), **_apart(prompt, sampling, n)}


def ways_to_search(prompt: Prompt, width: int, tokens: int) -> dict[str, Way]:
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    search = Request(prompt, replace(sampling, beam=Beam(width)), cache_salt="one")
    return {
        f"one search, {width} beams": Way([search]),
        **_apart(prompt, replace(sampling, temperature=1.0, seed=0), width),
    }


def _apart(prompt: Prompt, sampling: Sampling, number: int) -> dict[str, Way]:
    """As many sequences, each a request of its own."""

    def requests(salts: Sequence[str]) -> list[Request]:
        return [
            Request(prompt, replace(sampling, seed=seed), cache_salt=salt)
            for seed, salt in enumerate(salts)
        ]

    own = [f"own {seed}" for seed in range(number)]
    return {
        f"{number} requests": Way(requests(["shared"] * number)),
        f"{number} requests, nothing shared": Way(requests(own)),
        f"{number} requests, nothing shared, all at work": Way(requests(own), warm=True),
    }


async def compare(
    deployment: Deployment, prompts: Prompts, args: argparse.Namespace
) -> list[dict[str, list[Run]]]:
    kinds = [(ways_to_sample, args.n), (ways_to_search, args.width)]
    runs: list[dict[str, list[Run]]] = [{} for _ in kinds]
    (socket,) = deployment.run_root.rglob("redis.sock")
    store = await RedisStore.connect(f"unix://{socket}")
    (pool_id,) = await store.pool_ids()
    pool = Pool(store, pool_id)
    async with AsyncClient(deployment.address, operations=deployment.operations) as client:
        for ways, number in kinds:
            for way in ways(prompts.draw(args.prompt), number, 8).values():
                await measure(client, pool, way)  # warm-up
        for _ in range(args.rounds):
            for (ways, number), found in zip(kinds, runs, strict=True):
                for what in ways([], number, args.tokens):
                    way = ways(prompts.draw(args.prompt), number, args.tokens)[what]
                    found.setdefault(what, []).append(await measure(client, pool, way))
    await store.close()
    return runs


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    first = next(iter(runs.values()))
    one_s = statistics.median(run.seconds for run in first)
    one_blocks = statistics.median(run.num_blocks for run in first)
    rows = []
    for what, of_it in runs.items():
        seconds = sorted(run.seconds for run in of_it)
        middle_s = statistics.median(seconds)
        blocks = statistics.median(run.num_blocks for run in of_it)
        spread = f"{middle_s:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        ratios = f"{middle_s / one_s:.2f}", f"{blocks / one_blocks:.2f}"
        rows.append([what, spread, ratios[0], f"{blocks:.0f}", ratios[1]])
    return markdown(["", "seconds", "ratio", "blocks", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--n", type=int, default=16, help="samples")
    parser.add_argument("--width", type=int, default=8, help="beams")
    parser.add_argument("--prompt", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool-memory", default="2GiB")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    most = max(args.n, args.width)
    options = ("--max-num-seqs", str(most), "--pool-memory", args.pool_memory)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", SHAPES[args.shape])
        with serving(checkpoint, Path(folder), *options) as deployment:
            prompts = prompts_of(checkpoint, args.seed)
            for runs in asyncio.run(compare(deployment, prompts, args)):
                print(table(runs), end="\n\n")


if __name__ == "__main__":
    main()
