"""The same figures of a running deployment: what its pool has handed out, beside what its clients
have received."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.serve import EMBEDDED
from bench.serving.prompts import Prompts
from bench.serving.target import GatewayTarget, Prompt, Target
from blockstore.memory_store import MemoryStore
from blockstore.redis_store import RedisStore
from blockstore.store import HolderInfo
from services.advisor.memory import PagedMemory
from services.advisor.simulation import Outcome, simulate
from services.advisor.workload import Asked
from services.common.pool.layout import PoolLayout
from services.common.pool.stamps import record_bytes
from services.common.text.model_config import ModelConfig
from services.common.ticket import parts_of_order
from tests.e2e.deployment import Deployment, serving

BLOCK_SIZE = 16
_INTERVAL_S = 0.02
_MOST_AT_ONCE = 64
_MOST_ODD = 0.01


@dataclass(slots=True)
class Seen:
    """Sums over all samples, in slots. `in_prefill`: of requests that have blocks, and whose client
    has no token yet: how far their prompt is computed nobody tells. `num_odd`: holders with fewer
    blocks than their stream's KV takes, which there are if a stream was taken for another's."""

    num_samples: int = 0
    num_running: int = 0
    num_odd: int = 0
    reserved: int = 0
    kv: int = 0
    tail: int = 0
    ahead: int = 0
    in_prefill: int = 0
    seconds: float = 0.0
    peak: tuple[int, int] = field(default=(0, 0))
    """(KV, reserved)"""

    def add(self, size: int, holders: Sequence[HolderInfo], contexts: Mapping[int, int]) -> None:
        """`contexts`: tokens of each running stream whose KV is there, by its arrival."""
        kv_before, reserved_before = self.kv, self.reserved
        for holder in holders:
            _, arrival = parts_of_order(holder.order)
            context, num_slots = contexts.get(arrival, 0), holder.num_blocks * size
            self.reserved += num_slots
            if not context:
                self.in_prefill += num_slots
                continue
            tail = -context % size
            self.kv += context
            self.tail += tail
            self.ahead += num_slots - context - tail
            self.num_odd += num_slots < context
        self.num_samples += 1
        self.num_running += len(holders)
        self.peak = max(self.peak, (self.kv - kv_before, self.reserved - reserved_before))

    def cells(self) -> list[str]:
        shares = (self.kv, self.tail, self.ahead, self.in_prefill)
        kv, *wasted = (f"{100 * share / self.reserved:.1f} %" for share in shares)
        at_peak = f"{100 * self.peak[0] / self.peak[1]:.1f} %"
        return [kv, at_peak, *wasted, f"{self.num_running / self.num_samples:.1f}"]


def expected_cells(outcome: Outcome) -> list[str]:
    """As `Seen.cells`; a simulated prompt takes one step."""
    shares = (outcome.utilization, outcome.utilization_at_peak, *outcome.wasted)
    return [*(f"{100 * share:.1f} %" for share in shares), "-", f"{outcome.mean_running:.1f}"]


COLUMNS = ("KV", "at the peak", *PagedMemory.wastes, "in prefill", "at once")


def measure(
    asked: Sequence[Asked], num_slots: int, seed: int, directory: Path
) -> tuple[Seen, Outcome]:
    """Of `quire serve` with the embedded model, and of a simulation of the same requests on as many
    slots. RequestFailed."""
    memory = num_slots // BLOCK_SIZE * _bytes_per_block()
    args = ["--pool-memory", str(memory), "--max-num-seqs", str(_MOST_AT_ONCE)]
    args += ["--block-size", str(BLOCK_SIZE)]
    with serving(EMBEDDED, directory, *args) as deployment:
        seen = asyncio.run(_load(deployment, asked, seed))
    return seen, asyncio.run(_expected(asked, num_slots))


async def _expected(asked: Sequence[Asked], num_slots: int) -> Outcome:
    memory = await PagedMemory.on(MemoryStore(), "bench", num_slots, BLOCK_SIZE)
    return await simulate(asked, memory, _MOST_AT_ONCE)


async def _load(deployment: Deployment, asked: Sequence[Asked], seed: int) -> Seen:
    """All requests at once; sampled until the last one has ended."""
    prompts, target = Prompts.of(EMBEDDED, seed), GatewayTarget(deployment.address)
    await _receive(target, prompts.one(32), 8, [0], 0)  # everything is warm from here on
    received = [0] * len(asked)
    (socket,) = deployment.run_root.rglob("redis.sock")
    store = await RedisStore.connect(f"unix://{socket}")
    began, seen = time.perf_counter(), Seen()
    sampler = asyncio.create_task(_sample(store, asked, received, seen))
    await asyncio.gather(
        *(
            _receive(
                *(target, prompts.one(each.num_prompt_tokens), each.num_generated_tokens),
                *(received, number),
            )
            for number, each in enumerate(asked)
        )
    )
    seen.seconds = time.perf_counter() - began
    sampler.cancel()
    with suppress(asyncio.CancelledError):
        await sampler
    await store.close()
    await target.close()
    if seen.num_odd > seen.num_running * _MOST_ODD:
        raise RuntimeError(f"{seen.num_odd} of {seen.num_running} holders have too few blocks")
    return seen


async def _receive(
    target: Target, prompt: Prompt, num_tokens: int, received: list[int], number: int
) -> None:
    """Count what has come. RequestFailed."""
    async for count in target.stream(prompt, num_tokens):
        received[number] += count


async def _sample(
    store: RedisStore, asked: Sequence[Asked], received: Sequence[int], seen: Seen
) -> None:
    """Requests arrive in the order in which they were sent, and the first in line runs first."""
    (pool_id,) = await store.pool_ids()
    first: int | None = None
    while True:
        counts = list(received)  # before the holders: KV that is there needs blocks that are
        holders = await store.holders(pool_id)
        if holders:
            arrivals = [parts_of_order(holder.order)[1] for holder in holders]
            first = min(arrivals) if first is None else first
            seen.add(
                BLOCK_SIZE,
                holders,
                {
                    first + number: each.num_prompt_tokens + count - 1
                    for number, (each, count) in enumerate(zip(asked, counts, strict=True))
                    if 0 < count < each.num_generated_tokens
                },
            )
        await asyncio.sleep(_INTERVAL_S)


def _bytes_per_block() -> int:
    """With its stamp."""
    config = ModelConfig.from_directory(EMBEDDED)
    layers, heads, head_dim = config.num_layers, config.num_kv_heads, config.head_dim
    layout = PoolLayout("", "", layers, heads, head_dim, "bfloat16", BLOCK_SIZE)
    return layout.block_bytes + record_bytes(BLOCK_SIZE)
