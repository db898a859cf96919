"""Measures what clients notice when a process of a deployment is killed, or a worker is drained.

    python -m bench.recovery [restart]             seconds from the kill of each process to the end
                                                   of the first request that is answered, and until
                                                   one more decode worker takes load
    python -m bench.recovery crash [--sampled]     the pauses of streams whose decode worker is
                                                   killed; every stream must give the same tokens as
                                                   without a kill
    python -m bench.recovery drain                 the pauses of streams whose decode worker is
                                                   drained while a second one is idle, the tokens
                                                   that are computed again and the blocks copied

Each starts `quire serve` by itself and prints a markdown table. A drain may take two steps, one at
either worker, and 20 ms.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.harness import markdown, one_of, options
from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Worker
from quire.types import Sampling
from tests.e2e.decoders import decoders, until_two_serve
from tests.e2e.deployment import Deployment, serving
from tests.e2e.quiet import quiet
from tests.waiting import until

_VICTIMS = (
    "--role=prefill",
    "--role=decode",
    "services.gateway",
    "services.block_manager",
    "valkey",
)
_COMPUTED, _LISTENING = "quire:prompt_tokens_total", "metrics_listening"
_NUM_PROMPT_TOKENS, _NUM_CRASH_TOKENS = 64, 700
_KILLED_AFTER = 30
"""The number of tokens that the slowest stream has when its worker is killed."""
_WATCHED_S, _CONNECTED_S, _ALLOWED_MS = 1.0, 1.5, 20.0
"""How long the streams are watched before and after a drain; the time in which the gateway finds a
new worker; what a drain may take beside two steps."""


@dataclass(frozen=True)
class Options:
    what: str = one_of(("restart", "crash", "drain"), "restart", first=True)
    model: str = "demo"
    streams: int = 16
    """The number of streams of each decode worker."""
    repeats: int = 3
    sampled: bool = False
    """Whether tokens are drawn; otherwise they are greedy."""


@dataclass
class Stream:
    """A request that notes when each of its tokens came."""

    number: int
    sampling: Sampling
    seed: int = 0
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """The time of each message, in seconds of the wall clock, as the log has them."""
    in_the_middle: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: AsyncClient) -> None:
        chance = random.Random(f"{self.number} {self.seed}")
        prompt = [chance.randrange(300, 1000) for _ in range(_NUM_PROMPT_TOKENS)]
        async with client.generate(prompt, self.sampling, timeout_s=300) as deltas:
            async for delta in deltas:
                self.request_id = delta.request_id
                self.tokens += delta.token_ids
                self.times.append(time.time())
                if len(self.tokens) >= _KILLED_AFTER:
                    self.in_the_middle.set()

    def gaps_ms(self, begin: float, end: float = float("inf")) -> list[float]:
        """The times between messages of which the later one came from `begin` to `end`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1000 * (later - earlier) for earlier, later in pairs if begin <= later <= end]


def _streams(num: int, sampled: bool, num_tokens: int | None, seed: int = 0) -> list[Stream]:
    temperature = 1.0 if sampled else 0.0
    return [
        Stream(n, Sampling(temperature, seed=n, max_tokens=num_tokens, ignore_eos=True), seed)
        for n in range(num)
    ]


async def restart(deployment: Deployment, client: AsyncClient, args: Options) -> str:
    rows = []
    for victim in _VICTIMS:
        times = [await _after_kill(deployment, client, victim) for _ in range(args.repeats)]
        rows.append([f"{victim} killed", *_seconds(times)])
    times = [await _until_joined(client) for _ in range(args.repeats)]
    rows.append(["one more decode worker", *_seconds(times)])
    return markdown(["what", "median, s", "worst, s"], rows)


def _seconds(times: Sequence[float]) -> list[str]:
    return [f"{statistics.median(times):.1f}", f"{max(times):.1f}"]


async def _after_kill(deployment: Deployment, client: AsyncClient, victim: str) -> float:
    await _until_answered(client)
    await asyncio.sleep(2.0)
    for pid in deployment.children(victim):
        os.kill(pid, signal.SIGKILL)
    return await _until_answered(client)


async def _until_answered(client: AsyncClient) -> float:
    began = time.perf_counter()
    while True:
        try:
            await _answer(client, 8)
            await client.pools()
        except QuireError:
            await asyncio.sleep(0.02)
        else:
            return time.perf_counter() - began


async def _answer(client: AsyncClient, num_tokens: int) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    await client.complete(list(range(300, 340)), sampling, timeout_s=5.0)


async def _until_joined(client: AsyncClient) -> float:
    """The time from the order of one more decode worker until it runs a request beside the
    other."""
    await _until_answered(client)

    async def load() -> None:
        while True:
            await _answer(client, 40)

    async def both_run() -> bool:
        running = [worker.num_running for worker in await decoders(client)]
        return len(running) == 2 and all(running)

    loads = [asyncio.create_task(load()) for _ in range(2)]
    began = time.perf_counter()
    await client.scale(num_decode=2)
    await until(both_run, limit_s=60)
    took_s = time.perf_counter() - began
    for task in loads:
        task.cancel()
    await client.scale(num_decode=1)
    await _until(client, lambda there: len(there) == 1)
    return took_s


@dataclass
class Crash:
    """The effects of one kill."""

    reaped_ms: float
    """The time from the kill to the moment when the block manager has reaped the worker."""
    set_back_ms: float
    """The time from the kill to the moment when the gateway has set back the last request."""
    pauses_ms: list[float]
    """The longest pause of each stream of the killed worker."""
    num_recomputed_tokens: float
    usual_ms: float
    num_wrong: int


async def crash(deployment: Deployment, client: AsyncClient, args: Options) -> str:
    crashes = [await _crash(deployment, client, args, seed) for seed in range(args.repeats)]
    pauses = [pause for each in crashes for pause in each.pauses_ms]
    rows = [
        ["streams on killed workers", f"{len(pauses)} in {len(crashes)} kills"],
        ["streams with another token", str(sum(each.num_wrong for each in crashes))],
        ["from token to token", f"{statistics.median(each.usual_ms for each in crashes):.0f} ms"],
        ["gateway knows, median and worst", _ms([each.set_back_ms for each in crashes])],
        ["worker reaped, median and worst", _ms([each.reaped_ms for each in crashes])],
        ["pause, median and worst", _ms(pauses)],
        [
            "prompt tokens computed again, a stream",
            f"{max(each.num_recomputed_tokens for each in crashes):.1f}",
        ],
    ]
    return markdown(["what", ""], rows)


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ms, {max(values):.0f} ms"


async def _crash(deployment: Deployment, client: AsyncClient, args: Options, seed: int) -> Crash:
    """Run the streams alone, then once more with a kill of one of the two decode workers."""
    alone, disturbed = (
        _streams(2 * args.streams, args.sampled, _NUM_CRASH_TOKENS, seed) for _ in range(2)
    )
    await until_two_serve(client)
    await asyncio.gather(*(stream.run(client) for stream in alone))
    await quiet(client)
    tasks = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await asyncio.gather(*(stream.in_the_middle.wait() for stream in disturbed))
    computed = _worker_totals(deployment)[_COMPUTED]
    victim = deployment.running("--role=decode")[0]
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*tasks)
    events = [(name, _at(event), event) for name, event in _logged_since(deployment, killed_at)]
    ids = {event["request_id"] for name, _, event in events if name == "request_set_back"}
    hit = [stream for stream in disturbed if stream.request_id in ids]
    if not hit:
        raise RuntimeError("nothing ran on the worker that was killed")
    reaped = min(at for name, at, _ in events if name == "worker_reaped")
    set_back = max(at for name, at, _ in events if name == "request_set_back")
    return Crash(
        reaped_ms=1000 * (reaped - killed_at),
        set_back_ms=1000 * (set_back - killed_at),
        pauses_ms=[max(stream.gaps_ms(killed_at), default=0.0) for stream in hit],
        num_recomputed_tokens=(_worker_totals(deployment)[_COMPUTED] - computed) / len(hit),
        usual_ms=statistics.median(gap for stream in alone for gap in stream.gaps_ms(0.0)),
        num_wrong=sum(a.tokens != b.tokens for a, b in zip(alone, disturbed, strict=True)),
    )


def _logged_since(deployment: Deployment, moment: float) -> Iterator[tuple[str, dict[str, str]]]:
    for line in deployment.log.read_text().splitlines():
        _, begin, rest = line.partition('{"')
        if begin and rest.startswith("timestamp"):
            event = json.loads(begin + rest)
            if _at(event) >= moment:
                yield event["event"], event


def _at(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _worker_totals(deployment: Deployment) -> Mapping[str, float]:
    """The counters of all workers, from the ports that their log lines name."""
    events = [event for name, event in _logged_since(deployment, 0.0) if name == _LISTENING]
    return _totals(*(f"http://127.0.0.1:{event['port']}" for event in events))


def _totals(*urls: str) -> Mapping[str, float]:
    """The sum of all samples of each name, over the processes whose metrics are there; a process
    that has left counts nothing."""
    sums = defaultdict[str, float](float)
    for url in urls:
        with suppress(httpx.ConnectError):
            for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
                for sample in family.samples:
                    sums[sample.name] += sample.value
    return sums


async def drain(deployment: Deployment, client: AsyncClient, args: Options) -> str:
    header = ["streams moved", "tokens recomputed", "blocks copied", "step before, ms"]
    header += ["step after, ms", "longest gap, p50, ms", "longest gap, max, ms", "allowed, ms"]
    return markdown(header, [await _drain(deployment, client, args.streams)])


async def _drain(deployment: Deployment, client: AsyncClient, num_streams: int) -> list[str]:
    (leaving,) = await decoders(client)
    streams = _streams(num_streams, sampled=False, num_tokens=None)
    reading = [asyncio.create_task(stream.run(client)) for stream in streams]
    await until_two_serve(client)
    before = _counters(deployment)
    await asyncio.sleep(_CONNECTED_S)
    began = time.time()
    await client.drain(leaving.worker_id)
    await _until(client, lambda there: leaving.worker_id not in {w.worker_id for w in there})
    left = time.time()
    await asyncio.sleep(_WATCHED_S)
    if any(task.done() for task in reading):
        raise RuntimeError("the streams were too short")
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await _until(client, lambda there: not any(worker.num_running for worker in there))
    after = _counters(deployment)  # the gateway counts a request when it ends
    first, last = (
        statistics.median(gap for stream in streams for gap in stream.gaps_ms(begin, end))
        for begin, end in ((began - _WATCHED_S, began), (left, left + _WATCHED_S))
    )
    longest = [max(stream.gaps_ms(began, left)) for stream in streams]
    times = first, last, statistics.median(longest), max(longest), first + last + _ALLOWED_MS
    counts = (f"{now - then:.0f}" for then, now in zip(before, after, strict=True))
    return [*counts, *(f"{time_ms:.1f}" for time_ms in times)]


def _counters(deployment: Deployment) -> tuple[float, float, float]:
    """Moves of the gateway, tokens that workers have computed, and blocks that they have copied."""
    workers = _worker_totals(deployment)
    moves = _totals(deployment.http)["quire:num_moves_total"]
    copied = workers["quire:swapped_out_blocks_total"] + workers["quire:swapped_in_blocks_total"]
    return moves, workers[_COMPUTED], copied


async def _until(client: AsyncClient, holds: Callable[[list[Worker]], bool]) -> None:
    async def there() -> list[Worker]:
        return await decoders(client)

    await until(there, holds, limit_s=30)


async def _measure(deployment: Deployment, args: Options) -> str:
    async with AsyncClient(deployment.address, operations=deployment.operations) as client:
        of_kind = {"restart": restart, "crash": crash, "drain": drain}[args.what]
        return await of_kind(deployment, client, args)


def main() -> None:
    args = options(Options, __doc__)
    for role in ("PREFILL", "DECODE"):
        os.environ[f"QUIRE_{role}_METRICS_PORT"] = "0"
    sizes = ("--decode", "2") if args.what == "crash" else ()
    for _ in range(args.repeats if args.what == "drain" else 1):
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(args.model, Path(folder), *sizes) as deployment,
        ):
            print(asyncio.run(_measure(deployment, args)), flush=True)


if __name__ == "__main__":
    main()
