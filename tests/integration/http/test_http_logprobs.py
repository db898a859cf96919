"""Logprobs and echoed prompts over HTTP, in the shapes of OpenAI and vLLM, as OpenAI's own client
reads them."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from quire.types import Candidate, Usage
from services.gateway.api import GenerationRequest
from services.gateway.output.delta import Delta, PositionLogprobs, PromptReport
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.ticket import FinishReason

from .conftest import FakeGenerator

EURO = "€".encode()


def candidate(token_id: int, logprob: float, rank: int, token: bytes | str) -> Candidate:
    return Candidate(token_id, logprob, rank, token.encode() if isinstance(token, str) else token)


THE, A, HALF = (
    candidate(1, -0.5, 1, "The"),
    candidate(2, -1.5, 2, " a"),
    candidate(3, -2.5, 3, EURO[:2]),
)
TOKENS = [
    PositionLogprobs(THE, (THE, A), 0),
    PositionLogprobs(A, (THE, A), 3),
    PositionLogprobs(HALF, (THE, A), 5),
    PositionLogprobs(candidate(4, float("-inf"), 9, EURO[2:]), (THE, A), 5),
]
TEXTS = ["The", " a", "", "€"]
PROMPT = PromptReport(
    "Hi, you",
    (7, 8, 9),
    {1: b"The", 2: b" a", 7: b"Hi", 8: b",", 9: b" you"},
    lambda: [0, 2, 3],
    LogprobColumns.of(
        [Logprobs(-3.0, 4, (1, 2), (-0.5, -1.5)), Logprobs(-4.0, 5, (2, 1), (-1.5, -0.5))]
    ),
)


class Generator(FakeGenerator):
    """Generates the requested fields, one token a delta, always with the two likeliest tokens."""

    async def deltas(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        sampling = request.sampling
        number = min(sampling.max_tokens or len(TOKENS), len(TOKENS))
        prompt: PromptReport | None = None
        if request.echo or sampling.prompt_logprobs is not None:
            told = None if sampling.prompt_logprobs is None else PROMPT.logprobs
            prompt = replace(PROMPT, logprobs=told)
        for position in range(number):
            last = position == number - 1
            yield Delta(
                request.request_id,
                0,
                (TOKENS[position].chosen.token_id,),
                TEXTS[position],
                FinishReason.STOP if last else None,
                2 if last else None,
                Usage(3, 0, number, 1.5, 0) if last else None,
                (TOKENS[position],) if sampling.logprobs is not None else (),
                prompt if position == 0 else None,
            )


@pytest.fixture
def generator() -> Generator:
    return Generator()


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The only choice of a text completion."""
    answer = await http.post("/v1/completions", json={"prompt": "Hi, you", **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found: dict[str, Any] = choice
    return found


async def stream(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of all parts."""
    answer = await http.post(f"/v1/{path}", json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in json.loads(event)["choices"]]


def together(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of all parts of a stream, joined."""
    joined: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in choice["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    return joined


OF_TOKENS: dict[str, list[Any]] = {
    "text_offset": [0, 3, 5, 5],
    "token_logprobs": [-0.5, -1.5, -2.5, -9999.0],
    "tokens": ["The", " a", "bytes:\\xe2\\x82", "bytes:\\xac"],
    "top_logprobs": [
        {"The": -0.5, " a": -1.5},
        {" a": -1.5, "The": -0.5},
        {"bytes:\\xe2\\x82": -2.5, "The": -0.5, " a": -1.5},
        {"bytes:\\xac": -9999.0, "The": -0.5, " a": -1.5},
    ],
}


async def test_logprobs_of_a_text_completion(http: httpx.AsyncClient, generator: Generator) -> None:
    """Every part of a stream has the logprobs of its tokens; together they are those of the
    whole."""
    choice = await complete(http, logprobs=2)
    assert choice["logprobs"] == OF_TOKENS
    assert choice["text"] == "The a€"
    (request,) = generator.requests
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, None)
    choices = await stream(http, "completions", prompt="Hi, you", logprobs=2)
    assert len(choices) == 4
    assert together(choices) == OF_TOKENS


async def test_logprobs_come_only_when_asked_for(
    http: httpx.AsyncClient, generator: Generator
) -> None:
    for fields in ({}, {"logprobs": None}, {"logprobs": False}):
        choice = await complete(http, **fields)
        assert choice["logprobs"] is None
        assert "prompt_logprobs" not in choice
    assert all(request.sampling.logprobs is None for request in generator.requests)


async def test_logprobs_of_a_chat(client: openai.AsyncOpenAI, generator: Generator) -> None:
    """The opening of a stream has none; without a number, only those of the tokens themselves are
    asked for."""
    chat: Any = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    answer: Any = await client.chat.completions.create(**chat, top_logprobs=2)
    stream: Any = await client.chat.completions.create(**chat, stream=True)
    opening, *parts = [part async for part in stream]
    assert opening.choices[0].logprobs is None
    streamed = [each for part in parts for each in part.choices[0].logprobs.content]
    whole = answer.choices[0].logprobs.content
    for content in (whole, streamed):
        assert [each.token for each in content] == OF_TOKENS["tokens"]
        assert [each.logprob for each in content] == OF_TOKENS["token_logprobs"]
        assert [each.bytes for each in content][2:] == [[0xE2, 0x82], [0xAC]]
    for each in whole:
        assert [(top.token, top.logprob, top.bytes) for top in each.top_logprobs] == [
            ("The", -0.5, list(b"The")),
            (" a", -1.5, list(b" a")),
        ]
    assert [request.sampling.logprobs for request in generator.requests] == [2, 0]


async def test_logprobs_of_a_prompt(http: httpx.AsyncClient, generator: Generator) -> None:
    """vLLM's field is in a text completion's choice, but in the answer of a chat."""
    expected = [
        None,
        {
            "8": {"logprob": -3.0, "rank": 4, "decoded_token": ","},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "The"},
        },
        {
            "9": {"logprob": -4.0, "rank": 5, "decoded_token": " you"},
            "2": {"logprob": -1.5, "rank": 1, "decoded_token": " a"},
        },
    ]
    choice = await complete(http, prompt_logprobs=1)
    assert choice["prompt_logprobs"] == expected
    assert (choice["text"], choice["logprobs"]) == ("The a€", None)
    messages = [{"role": "user", "content": "Hi"}]
    answer = await http.post(
        "/v1/chat/completions", json={"messages": messages, "prompt_logprobs": 1}
    )
    assert answer.json()["prompt_logprobs"] == expected
    assert [request.sampling.prompt_logprobs for request in generator.requests] == [1, 1]


async def test_an_echo_is_the_prompt_before_the_text(
    http: httpx.AsyncClient, generator: Generator
) -> None:
    choice = await complete(http, echo=True)
    assert (choice["text"], choice["logprobs"]) == ("Hi, youThe a€", None)
    assert generator.requests[0].sampling.prompt_logprobs is None


ECHOED: dict[str, list[Any]] = {
    "text_offset": [0, 2, 3, 7, 10, 12, 12],
    "token_logprobs": [None, -3.0, -4.0, *OF_TOKENS["token_logprobs"]],
    "tokens": ["Hi", ",", " you", *OF_TOKENS["tokens"]],
    "top_logprobs": [
        None,
        {",": -3.0, "The": -0.5, " a": -1.5},
        {" you": -4.0, " a": -1.5, "The": -0.5},
        *OF_TOKENS["top_logprobs"],
    ],
}


async def test_an_echo_has_logprobs_too(http: httpx.AsyncClient, generator: Generator) -> None:
    """The prompt's first token has none; each offset is the beginning of its token. The echo comes
    first in a stream."""
    choice = await complete(http, echo=True, logprobs=2)
    assert choice["logprobs"] == ECHOED
    for offset, token in zip(ECHOED["text_offset"][:5], ECHOED["tokens"][:5], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert generator.requests[0].sampling.prompt_logprobs == 2
    assert "prompt_logprobs" not in choice
    choices = await stream(http, "completions", prompt="Hi, you", echo=True, logprobs=2)
    assert [choice["text"] for choice in choices] == ["Hi, youThe", " a", "", "€"]
    assert together(choices) == ECHOED


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_is_scored_without_an_answer(
    http: httpx.AsyncClient, generator: Generator, streams: bool
) -> None:
    """max_tokens=0: the token that comes with a prompt is neither sent nor counted."""
    fields: dict[str, Any] = {"prompt": "Hi, you", "echo": True, "max_tokens": 0, "logprobs": 1}
    if streams:
        (choice,) = await stream(http, "completions", return_token_ids=True, **fields)
    else:
        answer = (
            await http.post("/v1/completions", json={**fields, "return_token_ids": True})
        ).json()
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 3
    assert (choice["text"], choice["token_ids"]) == ("Hi, you", [])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert choice["logprobs"]["tokens"] == ["Hi", ",", " you"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -4.0]
    assert choice["logprobs"]["top_logprobs"][1:] == [
        {",": -3.0, "The": -0.5},
        {" you": -4.0, " a": -1.5},
    ]
    assert generator.requests[0].sampling.max_tokens == 1
