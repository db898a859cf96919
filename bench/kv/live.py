"""The same figures of a running deployment, by what its blocks say of themselves.

A pool's ledger says who holds which blocks, the blocks' stamps which of them are full of KV,
whoever of the workers has the request, or nobody just now. Only how far a sequence's unfinished
block is filled is nobody's to read; the tokens that its client has say it, up to a few that are on
their way.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio

from advisor.memory import PagedMemory
from advisor.simulation import Outcome, simulate
from advisor.workload import RecordedRequest
from bench.serving.scenarios import prompts_of
from bench.serving.server import gateway_target
from blockstore.memory_store import MemoryStore
from blockstore.redis.keys import pool_tag
from blockstore.redis_store import RedisStore
from quire.bench.target import Call, Target
from quire.supervisor.model_source import DEMO, find_model
from quire.types import Prompt
from services.common.pool.directory import PoolDirectory
from services.common.pool.layout import PoolLayout
from services.common.pool.stamps import Stamp, Stamps, StampState, record_bytes
from services.common.text.model_config import ModelConfig
from services.protocol.ticket import parts_of_order
from tests.e2e.deployment import Deployment, serving

BLOCK_SIZE = 16
_INTERVAL_S = 0.05
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Holding:
    """The blocks of one request: `num_full` of its `num_blocks`, the first ones, are full of KV.
    `num_received`: tokens that its client has."""

    asked: RecordedRequest
    num_received: int
    num_blocks: int
    num_full: int


@dataclass(slots=True)
class Seen:
    """Sums over all samples, in slots:

    one that is computed, for   |=======|=======|.......|.......|
    the first time or again       full    full    uncomputed
    one that decodes, or rests, |=======|=======|====...|.......|
    and whose client has tokens   full    full    tail    ahead
    one that has ended          |.......|.......|.......|.......|
                                  over, until its release is written
    """

    num_samples: int = 0
    num_running: int = 0
    reserved: int = 0
    kv: int = 0
    tail: int = 0
    ahead: int = 0
    uncomputed: int = 0
    over: int = 0
    seconds: float = 0.0
    peak: tuple[int, int] = field(default=(0, 0))
    """(KV, reserved)"""

    def add(self, size: int, holdings: Sequence[Holding]) -> None:
        kv_before, reserved_before = self.kv, self.reserved
        for holding in holdings:
            self._add(size, holding)
        self.num_samples += 1
        self.num_running += len(holdings)
        self.peak = max(self.peak, (self.kv - kv_before, self.reserved - reserved_before))

    def _add(self, size: int, holding: Holding) -> None:
        asked, num_full = holding.asked, holding.num_full
        self.reserved += holding.num_blocks * size
        if holding.num_received >= asked.num_generated_tokens:
            self.over += holding.num_blocks * size
            return
        self.kv += num_full * size
        num_left = holding.num_blocks - num_full
        num_computed = asked.num_prompt_tokens + holding.num_received - 1
        if not holding.num_received or num_full < num_computed // size:
            self.uncomputed += num_left * size
            return
        num_in_tail = num_computed % size if num_left else 0
        tail = -num_in_tail % size
        self.kv += num_in_tail
        self.tail += tail
        self.ahead += num_left * size - num_in_tail - tail

    def cells(self) -> list[str]:
        shares = (self.kv, self.tail, self.ahead, self.uncomputed, self.over)
        kv, *wasted = (f"{100 * share / self.reserved:.1f} %" for share in shares)
        at_peak = f"{100 * self.peak[0] / self.peak[1]:.1f} %"
        return [kv, at_peak, *wasted, f"{self.num_running / self.num_samples:.1f}"]


def expected_cells(outcome: Outcome) -> list[str]:
    """The cells as in `Seen.cells`; a simulated prompt takes one step, and a release no time."""
    shares = (outcome.utilization, outcome.utilization_at_peak, *outcome.wasted)
    return [*(f"{100 * share:.1f} %" for share in shares), "-", "-", f"{outcome.mean_running:.1f}"]


COLUMNS = ("KV", "at the peak", *PagedMemory.waste_kinds, "in prefill", "over", "at once")


def measure(
    asked: Sequence[RecordedRequest], num_slots: int, seed: int, directory: Path
) -> tuple[Seen, Outcome]:
    """Of `quire serve` with the demo model, and of a simulation of the same requests on as many
    slots. RequestFailed."""
    memory = num_slots // BLOCK_SIZE * _bytes_per_block()
    args = ["--pool-memory", str(memory), "--max-num-seqs", str(_MOST_AT_ONCE)]
    args += ["--block-size", str(BLOCK_SIZE)]
    with serving(DEMO, directory, *args) as deployment:
        seen = asyncio.run(_load(deployment, asked, seed))
    return seen, asyncio.run(_expected(asked, num_slots))


async def _expected(asked: Sequence[RecordedRequest], num_slots: int) -> Outcome:
    memory = await PagedMemory.on(MemoryStore(), "bench", num_slots, BLOCK_SIZE)
    return await simulate(asked, memory, _MOST_AT_ONCE)


async def _load(deployment: Deployment, asked: Sequence[RecordedRequest], seed: int) -> Seen:
    """Run all requests at once, and sample until the last one has ended."""
    prompts = prompts_of(find_model(DEMO).directory, seed)
    target = gateway_target(deployment.address)
    warm_up, seen = _Stream(RecordedRequest(32, 8), prompts.draw(32)), Seen()
    await warm_up.receive(target)  # everything is warm from here on
    streams = [_Stream(each, prompts.draw(each.num_prompt_tokens)) for each in asked]
    pool = await _Pool.of(deployment)
    await pool.emptied()
    sampler = asyncio.create_task(_sample(pool, streams, seen))
    began = time.perf_counter()
    await asyncio.gather(*(stream.receive(target) for stream in streams))
    seen.seconds = time.perf_counter() - began
    sampler.cancel()
    with suppress(asyncio.CancelledError):
        await sampler
    await pool.close()
    await target.close()
    return seen


@dataclass(slots=True)
class _Stream:
    asked: RecordedRequest
    prompt: Prompt
    num_received: int = 0

    async def receive(self, target: Target) -> None:
        """Count what has come. RequestFailed."""
        async for chunk in target.stream(Call(self.prompt, self.asked.num_generated_tokens)):
            self.num_received += chunk.num_tokens


async def _sample(pool: "_Pool", streams: Sequence[_Stream], seen: Seen) -> None:
    """Requests arrive in the order in which they were sent, but for some that overtake others; one
    that has a full block is known by what is in it."""
    arrivals: list[int] = []
    by_begin = {tuple(stream.prompt[:BLOCK_SIZE]): stream for stream in streams}
    while True:
        if held := await pool.held():
            holdings = []
            arrivals = sorted({*arrivals, *held})
            for arrival, block_ids in held.items():
                full = pool.full(block_ids)
                stream = streams[arrivals.index(arrival)]
                if full:
                    begins = (full[0].token_ids[:length] for length in range(BLOCK_SIZE, 0, -1))
                    stream = next(by_begin[begin] for begin in begins if begin in by_begin)
                holdings.append(
                    Holding(stream.asked, stream.num_received, len(block_ids), len(full))
                )
            seen.add(BLOCK_SIZE, holdings)
        await asyncio.sleep(_INTERVAL_S)


class _Pool:
    """The only pool of a deployment: its ledger, and its stamps."""

    def __init__(self, store: RedisStore, server: redis.asyncio.Redis, pool: PoolDirectory) -> None:
        header = pool.read_header()
        self._store = store
        self._server = server
        self._pool_id = pool.pool_id
        self._stamps = Stamps(pool.stamps, header.num_blocks, header.layout.block_size)
        self._root = self._stamps.read(0).parent

    @classmethod
    async def of(cls, deployment: Deployment) -> "_Pool":
        """On which one prompt has been computed: in the first blocks."""
        (socket,) = deployment.run_root.rglob("redis.sock")
        (stamps,) = deployment.run_root.rglob("stamps")
        store = await RedisStore.connect(f"unix://{socket}")
        server = redis.asyncio.Redis.from_url(f"unix://{socket}")
        return cls(store, server, PoolDirectory(stamps.parent))

    async def held(self) -> dict[int, list[int]]:
        """Blocks by the arrival of who holds them, in the order of the tokens in them."""
        holders = await self._store.holders(self._pool_id)
        async with self._server.pipeline(transaction=True) as reads:
            for holder in holders:
                reads.lrange(f"{pool_tag(self._pool_id)}:acquired:{holder.holder_id}", 0, -1)
            tables = await reads.execute()
        return {
            parts_of_order(holder.order)[1]: [int(block_id) for block_id in table]
            for holder, table in zip(holders, tables, strict=True)
            if table  # it was not released in between
        }

    async def emptied(self) -> None:
        while True:
            if not await self.held():
                return
            await asyncio.sleep(_INTERVAL_S)

    def full(self, block_ids: Sequence[int]) -> list[Stamp]:
        """The stamps of the full blocks, in order. A block that has just got a new holder may not
        yet have a stamp that says so."""
        parent, full = self._root, list[Stamp]()
        for block_id in block_ids:
            stamp = self._stamps.read(block_id)
            if stamp.state is not StampState.COMMITTED or stamp.parent != parent:
                break
            parent = stamp.prefix_hash
            full.append(stamp)
        return full

    async def close(self) -> None:
        self._stamps.close()
        await self._server.aclose()
        await self._store.close()


def _bytes_per_block() -> int:
    """The bytes of a block with its stamp."""
    config = ModelConfig.from_directory(find_model(DEMO).directory)
    layers, heads, head_dim = config.num_layers, config.num_kv_heads, config.head_dim
    layout = PoolLayout("", "", layers, heads, head_dim, "bfloat16", BLOCK_SIZE)
    return layout.block_bytes + record_bytes(BLOCK_SIZE)
