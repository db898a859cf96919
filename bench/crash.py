"""Measures how long a client's stream pauses when its decode worker is killed, and checks that the
stream goes on with the same tokens.

    python -m bench.crash [--model demo] [--streams 16] [--repeats 5] [--sampled]

Starts `quire serve` with two decode workers by itself, `--streams` on each, kills one of the two in
mid-stream, and compares every stream with what it gave undisturbed. Prints a markdown table.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bench.counters import totals
from quire.async_client import AsyncClient
from quire.supervisor.run_directory import free_port
from quire.types import Sampling
from tests.e2e.deployment import Deployment, serving

NUM_PROMPT_TOKENS = 64
MAX_TOKENS = 700
KILLED_AFTER = 30
"""Tokens that the slowest stream has by then."""


@dataclass
class Stream:
    """Times are those of the wall clock, in seconds, so that they compare with the log's."""

    prompt: list[int]
    sampling: Sampling
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    in_the_middle: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient) -> None:
        async with client.generate(self.prompt, self.sampling, timeout_s=120) as deltas:
            async for delta in deltas:
                self.request_id = delta.request_id
                self.tokens += delta.token_ids
                self.times.append(time.time())
                if len(self.tokens) >= KILLED_AFTER:
                    self.in_the_middle.set()

    @property
    def usual_s(self) -> float:
        """The mean time from token to token without a kill."""
        return (self.times[-1] - self.times[0]) / (len(self.tokens) - 1)

    def pause_after(self, moment: float) -> float:
        """The longest one that ended after `moment`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later > moment), default=0.0)


@dataclass
class Crash:
    """The times of one kill, in seconds from it."""

    reaped_s: float
    set_back_s: float
    pauses_s: list[float]
    num_recomputed_tokens: float
    usual_s: float


def streams(number: int, sampled: bool, seed: int) -> list[Stream]:
    rng = random.Random(seed)
    return [
        Stream(
            [rng.randrange(300, 1000) for _ in range(NUM_PROMPT_TOKENS)],
            Sampling(
                temperature=1.0 if sampled else 0.0,
                seed=number,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
            ),
        )
        for number in range(number)
    ]


async def crash(
    deployment: Deployment, client: AsyncClient, metrics: int, running: Sequence[Stream]
) -> Crash:
    """Run them all, kill one of the decode workers amid."""
    await until_healed(client)
    tasks = [asyncio.create_task(stream.run(client)) for stream in running]
    await asyncio.gather(*(stream.in_the_middle.wait() for stream in running))
    before, victim = computed_tokens(metrics), deployment.running("--role=decode")[0]
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*tasks)
    events = list(logged_since(deployment.log, killed_at))
    lost = [event for event in events if event["event"] == "request_set_back"]
    ids = {event["request_id"] for event in lost}
    hit = [stream for stream in running if stream.request_id in ids]
    if not hit:
        raise RuntimeError("nothing ran on the worker that was killed")
    return Crash(
        reaped_s=min(at(e) for e in events if e["event"] == "worker_reaped") - killed_at,
        set_back_s=max(at(event) for event in lost) - killed_at,
        pauses_s=[stream.pause_after(killed_at) for stream in hit],
        num_recomputed_tokens=(computed_tokens(metrics) - before) / len(hit),
        usual_s=statistics.median(stream.usual_s for stream in running),
    )


async def until_healed(client: AsyncClient) -> None:
    """Two decode workers serve, and nothing is held."""
    async with asyncio.timeout(60):
        while True:
            workers = await client.workers()
            ready = [w for w in workers if w.role == "decode" and w.state == "serving"]
            if len(ready) == 2 and not any(pool.num_held for pool in await client.pools()):
                return
            await asyncio.sleep(0.05)


def logged_since(log: Path, moment: float) -> Iterator[dict[str, str]]:
    for line in log.read_text().splitlines():
        _, begin, rest = line.partition('{"')
        if begin and rest.startswith("timestamp"):
            event = json.loads(begin + rest)
            if at(event) >= moment:
                yield event


def at(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def computed_tokens(port: int) -> float:
    """Prompt tokens that the prefill worker has computed so far."""
    return totals(f"127.0.0.1:{port}")["quire:prompt_tokens_total"]


async def measure(
    deployment: Deployment, metrics: int, number: int, repeats: int, sampled: bool
) -> None:
    client = AsyncClient(deployment.address, operations=deployment.operations)
    await until_healed(client)
    crashes, num_wrong = [], 0
    for repeat in range(repeats):
        alone = streams(2 * number, sampled, repeat)
        await asyncio.gather(*(stream.run(client) for stream in alone))
        disturbed = streams(2 * number, sampled, repeat)
        crashes.append(await crash(deployment, client, metrics, disturbed))
        pairs = zip(alone, disturbed, strict=True)
        num_wrong += sum(one.tokens != other.tokens for one, other in pairs)
    await client.close()
    report(crashes, num_wrong)


def report(crashes: Sequence[Crash], num_wrong: int) -> None:
    pauses = sorted(pause for crash in crashes for pause in crash.pauses_s)
    rows = [
        ("streams on killed workers", f"{len(pauses)} in {len(crashes)} kills"),
        ("streams with another token than undisturbed", str(num_wrong)),
        ("from token to token, on average", _ms([statistics.median(c.usual_s for c in crashes)])),
        ("gateway knows, median and worst", _ms([c.set_back_s for c in crashes])),
        ("worker reaped, median and worst", _ms([c.reaped_s for c in crashes])),
        ("pause, median and worst", _ms(pauses)),
        (
            "prompt tokens computed again, a stream",
            f"{max(c.num_recomputed_tokens for c in crashes):.1f}",
        ),
    ]
    print("| what | |\n|---|---:|")
    for what, value in rows:
        print(f"| {what} | {value} |")


def _ms(values: Sequence[float]) -> str:
    """Milliseconds: the median, and the worst where there are several."""
    middle = f"{statistics.median(values) * 1000:.0f} ms"
    return middle if len(values) == 1 else f"{middle}, {max(values) * 1000:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sampled", action="store_true")
    arguments = parser.parse_args()
    metrics = free_port("127.0.0.1")
    os.environ["QUIRE_PREFILL_METRICS_PORT"] = str(metrics)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(arguments.model, Path(folder), "--decode", "2") as deployment,
    ):
        work = measure(deployment, metrics, arguments.streams, arguments.repeats, arguments.sampled)
        asyncio.run(work)


if __name__ == "__main__":
    main()
