"""Measures the cost of too small a pool, and the gain of swapping, at several context lengths.

    python -m bench.preemption [--shape small] [--streams 16] [--contexts 128 512 1024] [--rounds 3]

Starts `quire serve` on a model with random weights by itself. All streams come at once,
each with a prompt of the context's length and as many tokens to generate. First on a
pool that holds them all: together, and a quarter of them at a time, since a quarter of the pool
holds no more and a smaller step is slower per token whatever the pool. Then on a quarter of that
pool, with each kind of preemption and as much memory to swap to as all need. Prints a markdown
table of medians over rounds; `computed` counts every token that went through the model, those
computed again too.
"""

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.serving.scenarios import prompts_of
from bench.tables import totals
from quire.async_client import AsyncClient
from quire.supervisor.run_directory import free_port
from quire.types import Completion, Prompt, Sampling
from services.pool.stamps import record_bytes
from tests.e2e.deployment import Deployment, serving

BLOCK_SIZE = 16
MIN_BLOCKS = 64
"""More than the watermark and the warm-up need."""


@dataclass(frozen=True)
class Load:
    """`num_streams` prompts of `context` tokens, each continued by as many."""

    num_streams: int
    context: int

    @property
    def num_blocks(self) -> int:
        """The blocks that all streams together need at their ends."""
        return self.num_streams * -(-(2 * self.context + 1) // BLOCK_SIZE)


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    what: str
    elapsed_s: float
    num_generated: int
    num_computed: int
    num_preemptions: int
    num_swapped_in: int

    @property
    def computed_per_s(self) -> float:
        return self.num_computed / self.elapsed_s

    @property
    def generated_per_s(self) -> float:
        return self.num_generated / self.elapsed_s

    def row(self, whole: "Run", quarter: "Run") -> str:
        return (
            f"| {self.what} | {self.elapsed_s:.1f} | {self.generated_per_s:,.0f} "
            f"| {self.computed_per_s:,.0f} | {self.computed_per_s / whole.computed_per_s:.2f} "
            f"| {self.computed_per_s / quarter.computed_per_s:.2f} "
            f"| {self.num_computed - whole.num_computed:,} | {self.num_preemptions} "
            f"| {self.num_swapped_in:,} |"
        )


HEADER = (
    "| | s | generated/s | computed/s | of all at once | of a quarter at a time "
    "| computed again | preempted | blocks swapped in |\n|---|" + "---:|" * 8
)


class Bench:
    def __init__(self, shape: str, rounds: int, directory: Path) -> None:
        self._spec = SHAPES[shape]
        self._rounds = rounds
        self._checkpoint = make_checkpoint(directory / "model", self._spec)
        self._directory = directory
        self._metrics = list[str]()
        for role in ("PREFILL", "DECODE"):
            port = free_port("127.0.0.1")
            os.environ[f"QUIRE_{role}_METRICS_PORT"] = str(port)
            self._metrics.append(f"127.0.0.1:{port}")

    def table(self, load: Load) -> str:
        """The results of all runs of one load."""
        all_blocks, quarter = load.num_blocks + MIN_BLOCKS, load.num_streams // 4
        whole = self._serve("all fit, all at once", load, all_blocks)
        by_quarters = self._serve("all fit, a quarter at a time", load, all_blocks, quarter)
        few = load.num_blocks // 4
        pressed = [
            self._serve(f"a quarter of the pool, {kind}", load, few, preemption=kind)
            for kind in ("recompute", "swap", "auto")
        ]
        rows = [run.row(whole, by_quarters) for run in (whole, by_quarters, *pressed)]
        return "\n".join([HEADER, *rows])

    def _serve(
        self, what: str, load: Load, num_blocks: int, at_once: int = 0, preemption: str = ""
    ) -> Run:
        args = ["--pool-memory", str(num_blocks * self._block_bytes)]
        args += ["--max-num-seqs", str(load.num_streams)]
        if preemption:
            args += ["--preemption", preemption]
        if preemption != "recompute" and preemption:
            args += ["--swap-memory", str(load.num_blocks * self._block_bytes)]
        with serving(self._checkpoint, self._directory, *args) as deployment:
            rounds = [
                asyncio.run(self._run(what, deployment, load, at_once or load.num_streams, seed))
                for seed in range(self._rounds)
            ]
        return sorted(rounds, key=lambda run: run.computed_per_s)[len(rounds) // 2]

    @property
    def _block_bytes(self) -> int:
        """The bytes of a block with its stamp."""
        spec = self._spec
        num_values = spec.num_layers * 2 * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim
        return num_values * (4 if spec.dtype == "float32" else 2) + record_bytes(BLOCK_SIZE)

    async def _run(
        self, what: str, deployment: Deployment, load: Load, at_once: int, seed: int
    ) -> Run:
        client = AsyncClient(deployment.address, operations=deployment.operations)
        limit = asyncio.Semaphore(at_once)

        async def one(prompt: Prompt, num_tokens: int) -> Completion:
            async with limit:
                sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
                return await client.complete(prompt, sampling)

        await asyncio.gather(*(one(prompt, 32) for prompt in self._prompts(100, 4, 64)))
        prompts = self._prompts(seed, load.num_streams, load.context)
        before, began = totals(*self._metrics), time.perf_counter()
        completions = await asyncio.gather(*(one(prompt, load.context) for prompt in prompts))
        elapsed_s, after = time.perf_counter() - began, totals(*self._metrics)
        await client.close()

        def count(name: str) -> int:
            return round(after[name] - before[name])

        return Run(
            what,
            elapsed_s,
            num_generated=sum(c.usage.num_generated_tokens for c in completions),
            num_computed=count("quire:iteration_tokens_sum"),
            num_preemptions=sum(c.usage.num_preemptions for c in completions),
            num_swapped_in=count("quire:swapped_in_blocks_total"),
        )

    def _prompts(self, seed: int, count: int, length: int) -> list[Prompt]:
        prompts = prompts_of(self._checkpoint, seed)
        return [prompts.draw(length) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(asked.shape, asked.rounds, Path(directory))
        for context in asked.contexts:
            print(f"\n{asked.streams} streams, {context} tokens in and {context} out\n")
            print(bench.table(Load(asked.streams, context)), flush=True)


if __name__ == "__main__":
    main()
