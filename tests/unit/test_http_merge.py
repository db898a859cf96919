"""The streams of several prompts, merged into one answer."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from services.gateway.http.answering.merge import merged
from services.runtime.errors import InvalidRequest


class Counting:
    """Streams that count; `num_open`: how many of them are open."""

    def __init__(self) -> None:
        self.num_open = 0

    async def stream(self, end: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
        self.num_open += 1
        try:
            for number in range(end):
                yield number
                await asyncio.sleep(0)
            if error:
                raise error
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_merged_streams_give_everything_in_order(num_streams: int) -> None:
    counting = Counting()
    streams = [aclosing(counting.stream(40)) for _ in range(num_streams)]
    seen: dict[int, list[int]] = {}
    async for number, item in merged(streams):
        seen.setdefault(number, []).append(item)
    assert seen == {number: list(range(40)) for number in range(num_streams)}
    assert counting.num_open == 0


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_closing_a_merged_stream_closes_all(num_streams: int) -> None:
    counting = Counting()
    both = merged([aclosing(counting.stream(1_000_000)) for _ in range(num_streams)])
    async for _, item in both:
        if item == 5:
            break
    await both.aclose()
    assert counting.num_open == 0


async def test_an_error_of_one_stream_ends_all() -> None:
    counting = Counting()
    streams = [
        aclosing(counting.stream(1_000_000)),
        aclosing(counting.stream(3, InvalidRequest("no"))),
    ]
    with pytest.raises(InvalidRequest, match="no"):
        async for _ in merged(streams):
            pass
    assert counting.num_open == 0
