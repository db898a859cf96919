"""Measures the pauses of streams when their decode worker is drained, and the cost of the drain.

    python -m bench.drain [--model demo] [--streams 16] [--repeats 3]

Starts `quire serve` by itself with one decode worker, which gets all streams, then a second one,
and drains the first. Prints a markdown table, a row for each repeat: how many streams moved, how
many tokens were computed again and blocks copied (by the workers' own counters), and the longest
gap between two messages that each stream saw from the drain until the worker had left. Allowed are
two steps, one at either worker, and 20 ms.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.counters import totals
from quire.async_client import AsyncClient
from quire.types import Sampling, Worker
from tests.e2e.decoders import decoders
from tests.e2e.deployment import Deployment, serving

_WATCHED_S = 1.0
_CONNECTED_S = 1.5
"""The gateway finds a worker that serves within this."""
_LIMIT_S = 30.0
_ALLOWED_MS = 20.0
_PROMPT_LENGTH = 64
_HEADER = (
    "| streams moved | tokens recomputed | blocks copied | step before, ms | step after, ms "
    "| longest gap, p50, ms | longest gap, max, ms | allowed, ms |\n|" + "---:|" * 8
)


@dataclass
class Stream:
    """`heard`: when each message came, in seconds of the performance counter."""

    number: int
    heard: list[float] = field(default_factory=list)

    async def read(self, client: AsyncClient) -> None:
        prompt = [random.Random(self.number).randrange(300, 380) for _ in range(_PROMPT_LENGTH)]
        sampling = Sampling(temperature=0.0, max_tokens=None, ignore_eos=True)
        async for _ in client.generate(prompt, sampling):
            self.heard.append(time.perf_counter())

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between messages, of which the later one came from `begin` to `end`."""
        pairs = zip(self.heard, self.heard[1:], strict=False)
        return [(later - earlier) * 1000 for earlier, later in pairs if begin <= later <= end]


@dataclass(frozen=True)
class Counters:
    """Counters of all workers and of the gateway."""

    num_moves: float
    num_computed: float
    num_copied: float


def counters(deployment: Deployment) -> Counters:
    workers = totals(*_metrics_addresses(deployment))
    return Counters(
        totals(deployment.http.removeprefix("http://"))["quire:num_moves_total"],
        workers["quire:prompt_tokens_total"],
        workers["quire:swapped_out_blocks_total"] + workers["quire:swapped_in_blocks_total"],
    )


def _metrics_addresses(deployment: Deployment) -> list[str]:
    lines = [line for line in deployment.log.read_text().splitlines() if line.startswith("{")]
    events = [json.loads(line) for line in lines if "metrics_listening" in line]
    return [f"127.0.0.1:{event['port']}" for event in events]


async def _until(client: AsyncClient, holds: Callable[[list[Worker]], bool]) -> None:
    """Wait for a condition on the decode workers."""
    async with asyncio.timeout(_LIMIT_S):
        while not holds(await decoders(client)):  # noqa: ASYNC110 - another process rings no bell
            await asyncio.sleep(0.02)


async def measure(deployment: Deployment, num_streams: int) -> str:
    """A row of the table."""
    async with AsyncClient(deployment.address, operations=deployment.operations) as client:
        (leaving,) = await decoders(client)
        streams = [Stream(number) for number in range(num_streams)]
        reading = [asyncio.create_task(stream.read(client)) for stream in streams]
        await client.scale(num_decode=2)
        await _until(client, lambda there: [w.state for w in there] == ["serving"] * 2)
        before = counters(deployment)
        await asyncio.sleep(_CONNECTED_S)
        began = time.perf_counter()
        await client.drain(leaving.worker_id)
        await _until(client, lambda there: leaving.worker_id not in {w.worker_id for w in there})
        left = time.perf_counter()
        await asyncio.sleep(_WATCHED_S)
        assert not any(task.done() for task in reading), "the streams were too short"
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await _until(client, lambda there: not any(worker.num_running for worker in there))
        after = counters(deployment)  # the gateway counts a request when it ends
    return _row(streams, before, after, began, left)


def _row(
    streams: list[Stream], before: Counters, after: Counters, began: float, left: float
) -> str:
    first, last = _step_ms(streams, began - _WATCHED_S, began), _step_ms(streams, left, left + 1)
    longest = [max(stream.gaps_ms(began, left)) for stream in streams]
    columns = [
        f"{after.num_moves - before.num_moves:.0f}",
        f"{after.num_computed - before.num_computed:.0f}",
        f"{after.num_copied - before.num_copied:.0f}",
        f"{first:.1f}",
        f"{last:.1f}",
        f"{statistics.median(longest):.1f}",
        f"{max(longest):.1f}",
        f"{first + last + _ALLOWED_MS:.1f}",
    ]
    return f"| {' | '.join(columns)} |"


def _step_ms(streams: list[Stream], begin: float, end: float) -> float:
    return statistics.median(gap for stream in streams for gap in stream.gaps_ms(begin, end))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16, help="at the worker that is drained")
    parser.add_argument("--serve", nargs="*", default=[], help="more flags of `quire serve`")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["QUIRE_GATEWAY_REBALANCE_S"] = "0"
    for role in ("PREFILL", "DECODE"):
        os.environ[f"QUIRE_{role}_METRICS_PORT"] = "0"
    print(_HEADER, flush=True)
    for _ in range(args.repeats):
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(args.model, Path(folder), *args.serve) as deployment,
        ):
            print(asyncio.run(measure(deployment, args.streams)), flush=True)


if __name__ == "__main__":
    main()
