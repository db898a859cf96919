"""Measures the time to swap one sequence out and back, and to compute it again, by its length.

    python -m bench.swap_cost [--shape 0.6b] [--tokens 16 128 512 2048] [--rounds 5] [--threads 1]

In one process, with the store in memory: the arenas, the copying and the model are the real ones,
and a store in a server adds about a millisecond for the five answers that a swap waits for. Prints
a markdown table of medians in milliseconds.
"""

import argparse
import asyncio
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from bench.make_checkpoint import SHAPES, make_checkpoint
from blockstore.memory_store import MemoryStore
from blockstore.records import Allocation
from services.engine.batch import Row
from services.engine.runner import Runner
from services.protocol.block_keys import BlockKeys
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence
from services.runtime.metrics import WorkerMetrics
from services.worker.config import PrefillSettings
from services.worker.loading import LoadedModel, load
from services.worker.membership import Membership, join, join_swap_pool
from services.worker.swap.pool import SwapPool

CHUNK = 512
ROOT_HASH = bytes(16)
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)


class Bench:
    """One worker on a pool and its colder one; sequences come one after another."""

    def __init__(self, loaded: LoadedModel, own: Membership, swap_pool: Membership) -> None:
        self._store, self._spec = own.store, own.spec
        self._pool_id, self._worker_id = own.spec.pool_id, own.worker_id
        self._runner = Runner(loaded.model, own.pool.kv, loaded.layout.block_size, loaded.ops)
        self._swap_pool = SwapPool(
            own.store,
            own,
            swap_pool,
            partial(swap_pool.pool.copy_from, own.pool, loaded.ops),
            partial(own.pool.copy_from, swap_pool.pool, loaded.ops),
            WorkerMetrics(CollectorRegistry()),
        )
        self._draw = random.Random(0)

    async def measure(self, num_tokens: int) -> tuple[float, float, float]:
        """Seconds: out, back, computed again."""
        tokens = [self._draw.randrange(300, 8000) for _ in range(num_tokens + 1)]
        blocks = await self._allocate(num_tokens)
        self._compute(tokens[:-1], blocks.block_ids)
        sequence = TicketSequence(0, (), blocks.block_ids, num_tokens)
        ticket = Ticket(
            *("r", 1, 1, blocks.holder_id, 1),
            pool_id=self._pool_id,
            root_hash=ROOT_HASH,
            prompt_token_ids=tuple(tokens),
            sampling=GREEDY,
            sequences=(sequence,),
        )
        began = time.perf_counter()
        swapped = await self._swap_pool.put(ticket)
        out_s = time.perf_counter() - began
        assert swapped is not None

        began = time.perf_counter()
        back = replace(ticket, swapped=swapped)
        contents = BlockKeys.of(back, self._spec.block_size)
        fetched = await self._swap_pool.fetch(back, blocks, contents)
        back_s = time.perf_counter() - began
        assert fetched.computed[0].num_tokens == num_tokens

        began = time.perf_counter()
        self._compute(tokens[:-1], blocks.block_ids)
        again_s = time.perf_counter() - began
        await self._store.release(self._pool_id, blocks.holder_id, 1)
        return out_s, back_s, again_s

    async def _allocate(self, num_tokens: int) -> Allocation:
        num_blocks = num_tokens // self._spec.block_size + 1
        holder_id = secrets.token_hex(8)
        return await self._store.allocate(
            self._pool_id, holder_id, self._worker_id, 1, [], num_blocks
        )

    def _compute(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        for start in range(0, len(tokens), CHUNK):
            self._runner.launch([Row(tokens[start : start + CHUNK], start, block_ids)]).result()

    def close(self) -> None:
        self._swap_pool.close()


async def run(settings: PrefillSettings, lengths: Sequence[int], rounds: int) -> None:
    loaded = load(settings, progress=lambda: None)
    store = MemoryStore()
    own = await join(
        store, "run", settings.pool_root, loaded.layout, "prefill-1", loaded.plan, watermark=0.0
    )
    assert loaded.swap_bytes is not None
    swap_pool = await join_swap_pool(own, loaded.swap_bytes)
    bench = Bench(loaded, own, swap_pool)
    await bench.measure(max(lengths))
    print("| tokens | MiB | out, ms | back, ms | computed again, ms | ratio |\n|" + "---:|" * 6)
    for num_tokens in lengths:
        times = [await bench.measure(num_tokens) for _ in range(rounds)]
        out_s, back_s, again_s = (statistics.median(column) for column in zip(*times, strict=True))
        num_bytes = -(-num_tokens // own.spec.block_size) * own.spec.block_bytes
        print(
            f"| {num_tokens:,} | {num_bytes / 2**20:.1f} | {out_s * 1e3:.1f} | {back_s * 1e3:.1f} "
            f"| {again_s * 1e3:,.0f} | {again_s / (out_s + back_s):.0f} |",
            flush=True,
        )
    bench.close()
    for member in (swap_pool, own):
        await member.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        settings = PrefillSettings.model_validate(
            {
                "model": make_checkpoint(Path(folder) / "model", SHAPES[asked.shape]),
                "run_dir": Path(shm),
                "pool_memory": "512MiB",
                "swap_memory": "512MiB",
                "threads": asked.threads,
            }
        )
        asyncio.run(run(settings, asked.tokens, asked.rounds))


if __name__ == "__main__":
    main()
