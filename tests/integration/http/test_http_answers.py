"""Answers over HTTP, as OpenAI's own client and httpx read them."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from services.gateway.api import ChatMessage
from services.gateway.http.answering.sending import EventStream

from .conftest import HI, TEXTS, FakeGenerator

TEXT = {"prompt": "Hi"}


async def test_a_chat_completion(client: openai.AsyncOpenAI, generator: FakeGenerator) -> None:
    answer = await client.chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=9
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The block tables")
    assert (choice.finish_reason, choice.index) == ("stop", 0)
    assert choice.model_extra == {"stop_reason": "END"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    (request,) = generator.requests
    assert request.prompt == (ChatMessage("user", "Hi"),)
    assert (request.model, request.sampling.max_tokens) == ("org/tiny", 9)
    assert answer.id == f"chatcmpl-{request.request_id}"


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
async def test_usage_so_far_comes_with_every_part(http: httpx.AsyncClient, kind: str) -> None:
    """As in vLLM, with include_usage; the opening of a chat counts no generated token."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream": True, "stream_options": options, "n": 2, **(HI if "chat" in kind else TEXT)}
    answer = await http.post(f"/v1/{kind}", json=body)
    parts = [json.loads(line[6:]) for line in answer.text.split("\n\n") if "choices" in line]
    told = [part["usage"]["completion_tokens"] for part in parts]
    assert told == [0] * (2 if "chat" in kind else 0) + [1, 2, 3, 4, 5, 6, 6]
    assert {part["usage"]["prompt_tokens"] for part in parts} == {7}
    assert {part["usage"]["total_tokens"] - 7 for part in parts} == set(told)


async def test_cached_tokens_that_the_client_may_not_know_are_null(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.num_cached_tokens = None
    answer = await http.post("/v1/chat/completions", json=HI)
    assert answer.json()["usage"]["prompt_tokens_details"] is None


async def test_drafts_of_speculation_are_in_the_usage(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """The sum of all prompts; null if there were none."""
    body = {"prompt": ["Hi", "Ho"]}
    answer = await http.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens_details"] is None
    generator.num_drafts = (3, 2)
    answer = await http.post("/v1/completions", json=body)
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}
    assert answer.json()["usage"]["completion_tokens_details"] == details


async def test_a_streamed_chat_completion(client: openai.AsyncOpenAI) -> None:
    """The role comes first, then text as it is generated, the finish reason with the last text,
    then the usage."""
    stream = await client.chat.completions.create(
        model="org/tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = [part async for part in stream]
    assert [part.choices[0].delta.content for part in parts] == ["", *TEXTS]
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts] == [None, None, None, "stop"]
    assert [part.usage for part in parts] == [None] * 4
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 10


async def test_a_completion_of_token_ids(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """With vLLM's extra fields, in the request and in the answer."""
    answer = await client.completions.create(
        model="org/tiny",
        prompt=[5, 6],
        seed=3,
        extra_body={"return_token_ids": True, "ignore_eos": True, "request_id": "mine"},
    )
    (choice,) = answer.choices
    assert choice.text == "The block tables"
    assert choice.model_extra == {"stop_reason": "END", "token_ids": [100, 101, 102]}
    (request,) = generator.requests
    assert (request.prompt, request.sampling.seed) == ((5, 6), 3)
    assert request.sampling.ignore_eos
    assert (request.request_id, answer.id) == ("mine", "cmpl-mine")


async def test_a_streamed_completion(http: httpx.AsyncClient) -> None:
    """Byte for byte: events, their end, and no usage unless it was asked for."""
    body = {"prompt": "Hi", "stream": True, "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [part["choices"][0]["text"] for part in parts] == TEXTS
    assert [part["choices"][0]["token_ids"] for part in parts] == [[100], [101], [102]]
    assert parts[-1]["choices"][0]["stop_reason"] == "END"
    assert {part["model"] for part in parts} == {"org/tiny"}
    assert not any("usage" in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_samples_of_several_prompts_are_numbered_prompt_by_prompt(
    client: openai.AsyncOpenAI, generator: FakeGenerator, stream: bool
) -> None:
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    if stream:
        async for part in await client.completions.create(
            model="org/tiny", prompt=["a", "b"], n=3, stream=True
        ):
            (one,) = part.choices
            texts[one.index] = texts.get(one.index, "") + one.text
            reasons[one.index] = one.finish_reason
    else:
        answer = await client.completions.create(model="org/tiny", prompt=["a", "b"], n=3)
        assert [choice.index for choice in answer.choices] == list(range(6))
        texts = {choice.index: choice.text for choice in answer.choices}
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 18
    assert texts == dict.fromkeys(range(6), "The block tables")
    assert reasons == dict.fromkeys(range(6), "stop")
    assert [request.sampling.n for request in generator.requests] == [3, 3]


async def test_samples_of_a_streamed_chat_have_their_own_openings(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": "Hi"}], n=2, stream=True
    )
    parts = [part.choices[0] async for part in stream]
    for index in range(2):
        mine = [part for part in parts if part.index == index]
        assert [part.delta.content for part in mine] == ["", *TEXTS]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["chat/completions", "completions", "responses", "embeddings"])
async def test_answer_names_the_model_whose_workers_come_after_the_request(
    http: httpx.AsyncClient, generator: FakeGenerator, kind: str
) -> None:
    generator.has_workers = False
    bodies: dict[str, Any] = {"chat/completions": HI, "completions": TEXT}
    body = bodies.get(kind, {"input": "Hi"})
    answer = await http.post(f"/v1/{kind}", json=body)
    assert answer.json()["model"] == "org/tiny"
    generator.has_workers = False
    if kind != "embeddings":
        streamed = await http.post(f"/v1/{kind}", json={**body, "stream": True})
        assert '"model":"org/tiny"' in streamed.text
        assert '"model":""' not in streamed.text


async def test_no_character_of_a_stream_ends_a_line() -> None:
    """Of clients such as httpx, which splits lines as `str.splitlines` does."""
    text = "".join(map(chr, range(0x3000)))

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": text}

    stream = EventStream(events(), lambda _: {}, 0.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(stream)) as client:
        data, *rest = (await client.get("http://x/")).text.splitlines()
    assert rest == ["", "data: [DONE]", ""]
    assert json.loads(data.removeprefix("data: ")) == {"text": text}
