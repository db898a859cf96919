"""The loads of `bench.compare` send the requests that they describe, and their figures are those of
the answers."""

import asyncio
import math
from collections.abc import AsyncGenerator

import pytest

from bench.serving.scenarios import (
    closed,
    decode_rate,
    interference,
    poisson,
    prefixed,
    worst_gap_s,
)
from quire.bench.options import WorkloadOptions
from quire.bench.prompts import Prompts
from quire.bench.record import Record
from quire.bench.target import Call, Chunk, RequestFailed

LONG = 1000


class Fake:
    """A server with a token each millisecond for every request. A prompt of `LONG` tokens or more
    stops all others for `stall_s`, until it has its first token. Prompts that it has refused
    fail."""

    def __init__(self, stall_s: float = 0.0, num_refused: int = 0, num_missing: int = 0) -> None:
        self.prompts: list[list[int]] = []
        self.num_running = self.most_running = 0
        self._stall_s, self._num_refused, self._num_missing = stall_s, num_refused, num_missing
        self._free = asyncio.Event()
        self._free.set()

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        assert isinstance(call.prompt, list)
        self.prompts.append(call.prompt)
        if len(self.prompts) <= self._num_refused:
            raise RequestFailed("the queue is full")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if len(call.prompt) >= LONG:
                self._free.clear()
                await asyncio.sleep(self._stall_s)
                self._free.set()
            for _ in range(call.num_tokens - self._num_missing):
                await self._free.wait()
                await asyncio.sleep(0.001)
                yield Chunk(1)
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        pass


def drawn(seed: int = 0) -> Prompts:
    return Prompts(seed, None)


async def test_a_closed_loop_keeps_its_streams_busy() -> None:
    server = Fake()
    seen = await closed(server, drawn(), 3, WorkloadOptions(7, 5))
    assert server.most_running == 3
    assert [len(prompt) for prompt in server.prompts] == [7] * 3
    assert seen.values["failed"] == 0
    assert seen.values["tok/s"] == pytest.approx(15 / seen.values["seconds"])


async def test_goodput_counts_whole_answers_in_time() -> None:
    server = Fake(num_refused=5)
    seen = await poisson(server, drawn(), 10_000.0, 20, WorkloadOptions(7, 3), seed=1)
    assert len(server.prompts) == 20
    assert (seen.values["good %"], seen.values["failed"]) == (75, 5)


async def test_warm_requests_share_the_prefix_of_the_cold_ones_and_nothing_else() -> None:
    server = Fake()
    await prefixed(server, drawn(), 2, WorkloadOptions(8, 1, prefix_len=32))
    assert len(server.prompts) == 4
    assert len({tuple(prompt[:32]) for prompt in server.prompts}) == 1
    assert len({tuple(prompt[32:]) for prompt in server.prompts}) == 4


async def test_streams_are_cancelled_when_the_long_prompt_has_its_token() -> None:
    server = Fake(stall_s=0.1)
    seen = await interference(server, drawn(), 2, 1, LONG)
    assert seen.values["worst gap ms"] >= 100
    assert seen.values["ttft p50 ms"] >= 100
    assert seen.values["worst / quiet"] > 1
    assert server.num_running == 0


@pytest.mark.parametrize("num_refused", [1, 2])
async def test_a_stream_that_fails_fails_the_scenario(num_refused: int) -> None:
    with pytest.raises(RequestFailed, match="queue is full"):
        await interference(Fake(num_refused=num_refused), drawn(), 2, 1, LONG)


async def test_an_answer_of_another_length_is_none() -> None:
    with pytest.raises(RequestFailed, match="4 tokens instead of 5"):
        await closed(Fake(num_missing=1), drawn(), 1, WorkloadOptions(1, 5))


def record(*arrivals: tuple[float, int]) -> Record:
    return Record(0.0, 0.0, [at for at, _ in arrivals], [count for _, count in arrivals])


def test_the_worst_gap_is_of_those_that_touch_the_time() -> None:
    seen = record(*((at, 1) for at in (1.0, 4.0, 5.0, 7.0, 7.5, 20.0)))
    assert worst_gap_s(seen, began=4.5, ended=7.2) == 2.0
    assert worst_gap_s(seen, began=3.9, ended=7.2) == 3.0


def test_decode_is_measured_while_all_streams_decode() -> None:
    """From 2.0, when the second request has its first token, to 5.0, when the first has its last: 3
    tokens of the first and 2 + 1 of the second."""
    first = record((1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1))
    second = record((2.0, 1), (3.0, 2), (5.0, 1), (6.0, 1), (7.0, 1))
    assert decode_rate([first, second]) == (3 + 3) / 3.0


def test_streams_that_never_run_side_by_side_have_no_decode_rate() -> None:
    assert math.isnan(decode_rate([record((1.0, 1), (2.0, 1)), record((3.0, 1))]))
