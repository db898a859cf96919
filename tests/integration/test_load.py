"""The load generator of the benchmarks against an HTTP server: what came, and what failed."""

import itertools
import json
import statistics
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.load import HttpTarget, Prompts, poisson, send_all

ANSWERS: dict[str, list[Any]] = {
    "ids": [{"token_ids": [7, 8], "text": ""}, {"token_ids": [9], "text": "a"}],
    "text": [{"text": "a"}, {"text": ""}, {"text": "b"}, {"text": "c"}],
    "short": [{"text": "a"}],
}


@pytest.fixture
async def target() -> AsyncIterator[HttpTarget]:
    """A server that answers a prompt as it says: with three tokens, too few, or an error."""

    async def answer(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        if prompt == "refused":
            return web.Response(status=429, text="too many")
        response = web.StreamResponse()
        await response.prepare(request)
        events: list[Any] = [{"choices": [choice]} for choice in ANSWERS.get(prompt, [])]
        if prompt == "error":
            events = [{"error": {"message": "out of memory"}}]
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if prompt != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        target = HttpTarget(str(server.make_url("")).rstrip("/"), "m")
        yield target
        await target.close()


async def test_tokens_are_counted_by_ids_or_else_by_texts(target: HttpTarget) -> None:
    ids, text = await send_all(target, ["ids", "text"], 3, at_a_time=1)
    assert (ids.error, ids.num_tokens, len(ids.arrivals)) == ("", 3, 2)
    assert (text.error, text.num_tokens, len(text.arrivals)) == ("", 3, 3)
    assert min(ids.ttft_s, *text.gaps_s) >= 0


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refused", "status 429: too many"),
        ("error", "out of memory"),
        ("cut", "without [DONE]"),
        ("short", "1 tokens instead of 3"),
    ],
)
async def test_an_answer_that_is_not_whole_has_an_error(
    target: HttpTarget, prompt: str, error: str
) -> None:
    (record,) = await send_all(target, [prompt], 3)
    assert error in record.error


async def test_requests_are_sent_at_their_times(target: HttpTarget) -> None:
    first, last = await send_all(target, ["ids", "ids"], 3, times=[0.0, 0.2])
    assert last.sent - first.sent > 0.19


def test_times_have_the_rate_and_its_randomness() -> None:
    times = list(itertools.islice(poisson(20.0, seed=1), 4000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[-1] == pytest.approx(200, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)
    assert times[:5] == list(itertools.islice(poisson(20.0, seed=1), 5))


def test_a_seed_names_its_prompts() -> None:
    first, again, other = (Prompts(seed, 2048).draw(64) for seed in (1, 1, 2))
    assert first == again != other
    assert all(300 <= token < 2048 for token in first)
