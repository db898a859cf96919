"""What is asked of a server: the loads of `bench/serve.py`.

Each scenario draws new prompts, so that nothing but what it shares on purpose is in a prefix cache.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from bench.serving.prompts import Prompts
from bench.serving.record import Record
from bench.serving.target import Prompt, RequestFailed, Target


async def closed_loop(
    target: Target, prompts: Iterable[Prompt], streams: int, num_tokens: int
) -> list[Record]:
    """`streams` clients, each of which sends its next prompt when the last one was answered."""
    waiting = iter(prompts)
    records: list[Record] = []

    async def client() -> None:
        for prompt in waiting:
            record = Record()
            records.append(record)
            await observe(target, prompt, num_tokens, record)

    await asyncio.gather(*(client() for _ in range(streams)))
    return records


async def poisson(
    target: Target, prompts: Sequence[Prompt], rate: float, num_tokens: int, seed: int
) -> list[Record]:
    """Prompts that arrive `rate` a second on average, whether the server keeps up or not."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(rate) for _ in prompts]
    began = time.perf_counter()
    records = [Record(sent=began + due) for due in itertools.accumulate(gaps)]

    async def client(prompt: Prompt, record: Record) -> None:
        await asyncio.sleep(record.sent - time.perf_counter())
        await observe(target, prompt, num_tokens, record)

    await asyncio.gather(*map(client, prompts, records))
    return records


_ENDLESS = 2048
"""Tokens of streams that are cancelled: more than they can decode until then."""


@dataclass(frozen=True, slots=True)
class Interference:
    """What streams that decode feel of a long prompt. Seconds."""

    quiet_gap_s: float
    """Their median gap before it."""

    worst_gap_s: float
    """Their longest gap while it was computed, the gap that its first token ended included."""

    ttft_s: float

    @property
    def ratio(self) -> float:
        return self.worst_gap_s / self.quiet_gap_s


async def interference(
    target: Target, short: Sequence[Prompt], long: Prompt, quiet_tokens: int = 32
) -> Interference:
    """`long` arrives when each of `short` has decoded `quiet_tokens`; they decode until it has its
    first token, and a little more. RequestFailed: one of them failed."""
    records = [Record() for _ in short]
    streams = [
        asyncio.create_task(observe(target, prompt, _ENDLESS, record))
        for prompt, record in zip(short, records, strict=True)
    ]
    try:
        await _reached(records, quiet_tokens)
        intruder = Record()
        await observe(target, long, 1, intruder)
        came = _first_arrival(intruder)
        await _reached(records, 8, since=came)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    quiet = [
        gap
        for record in records
        for gap, arrival in zip(record.gaps_s, record.arrivals[1:], strict=True)
        if arrival.at <= intruder.sent
    ]
    return Interference(
        statistics.median(quiet),
        max(worst_gap_s(record, intruder.sent, came) for record in records),
        intruder.ttft_s,
    )


def worst_gap_s(record: Record, began: float, ended: float) -> float:
    """The longest gap that touches the time between `began` and `ended`."""
    pairs = itertools.pairwise(record.arrivals)
    return max(
        later.at - earlier.at for earlier, later in pairs if later.at > began and earlier.at < ended
    )


async def _reached(records: Sequence[Record], count: int, since: float = 0.0) -> None:
    """Returns when each has so many arrivals after `since`. RequestFailed: one failed or
    ended."""
    for record in records:
        while sum(arrival.at > since for arrival in record.arrivals) < count:
            if record.error or record.num_tokens == _ENDLESS:
                raise RequestFailed(record.error or "a stream ended before the long prompt did")
            await asyncio.sleep(0.001)


def _first_arrival(record: Record) -> float:
    if record.error or not record.arrivals:
        raise RequestFailed(record.error or "the long prompt got no token")
    return record.arrivals[0].at


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Seconds until the last of the requests was answered, and what each saw."""

    cold: list[Record]
    warm: list[Record]


async def shared_prefix(
    target: Target, prompts: Prompts, count: int, prefix: int, suffix: int, num_tokens: int
) -> SharedPrefix:
    """`count` requests at once that share a prefix nobody has computed, then as many others with
    the same prefix."""
    common = prompts.one(prefix)

    async def once() -> list[Record]:
        return await closed_loop(target, prompts.sharing(common, count, suffix), count, num_tokens)

    return SharedPrefix(cold=await once(), warm=await once())


async def observe(target: Target, prompt: Prompt, num_tokens: int, record: Record) -> None:
    """Send a request and record what comes; an error of the server ends up in the record."""
    try:
        async with aclosing(target.stream(prompt, num_tokens)) as stream:
            async for count in stream:
                record.add(count)
    except RequestFailed as error:
        record.error = str(error)
        return
    if record.num_tokens != num_tokens:
        record.error = f"{record.num_tokens} tokens instead of {num_tokens}"
