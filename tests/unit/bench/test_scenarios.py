"""The loads send what they say, no more at a time than they say."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest

from bench.serving.record import Arrival, Record
from bench.serving.scenarios import closed_loop, interference, observe, poisson, worst_gap_s
from bench.serving.target import Prompt, RequestFailed


class Fake:
    """A server with a token each millisecond for everybody. A prompt of `long` tokens or more stops
    all others for `stall_s`, until it has its first token."""

    def __init__(self, long: int = 1000, stall_s: float = 0.1) -> None:
        self.seen: list[Prompt] = []
        self.num_running = self.most_running = 0
        self._long, self._stall_s = long, stall_s
        self._free = asyncio.Event()
        self._free.set()

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        self.seen.append(prompt)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if len(prompt) >= self._long:
                self._free.clear()
                await asyncio.sleep(self._stall_s)
                self._free.set()
            for _ in range(num_tokens):
                await self._free.wait()
                await asyncio.sleep(0.001)
                yield 1
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        pass


class Refusing(Fake):
    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        yield 1
        raise RequestFailed("no")


async def test_a_closed_loop_sends_each_prompt_once_and_keeps_its_streams_busy() -> None:
    server = Fake()
    prompts: list[Prompt] = [[n] for n in range(10)]
    records = await closed_loop(server, prompts, 3, 5)
    assert sorted(server.seen, key=str) == sorted(prompts, key=str)
    assert server.most_running == 3
    assert [record.num_tokens for record in records] == [5] * 10


async def test_arrivals_are_due_at_times_that_the_seed_names() -> None:
    prompts: list[Prompt] = [[n] for n in range(20)]
    runs = [await poisson(Fake(), prompts, 10_000.0, 1, seed) for seed in (1, 1, 2)]
    first, again, other = (
        [later.sent - earlier.sent for earlier, later in pairwise(run)] for run in runs
    )
    assert first == pytest.approx(again)
    assert first != pytest.approx(other)


async def test_streams_are_cancelled_when_the_long_prompt_has_its_token() -> None:
    server = Fake(stall_s=0.1)
    seen = await interference(server, [[1], [2]], [0] * 1000)
    assert seen.worst_gap_s >= 0.1
    assert seen.ttft_s >= 0.1
    assert seen.ratio == seen.worst_gap_s / seen.quiet_gap_s > 1
    assert server.num_running == 0


async def test_a_stream_that_fails_fails_the_scenario() -> None:
    with pytest.raises(RequestFailed, match="no"):
        await interference(Refusing(), [[1]], [0] * 1000)


def test_the_worst_gap_is_of_those_that_touch_the_time() -> None:
    record = Record(0.0, [Arrival(at, 1) for at in (1.0, 4.0, 5.0, 7.0, 7.5, 20.0)])
    assert worst_gap_s(record, began=4.5, ended=7.2) == 2.0
    assert worst_gap_s(record, began=3.9, ended=7.2) == 3.0


async def test_fewer_tokens_than_asked_for_is_an_error() -> None:
    class Short(Fake):
        async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
            yield num_tokens - 1

    record = Record()
    await observe(Short(), [1], 5, record)
    assert record.error == "4 tokens instead of 5"
