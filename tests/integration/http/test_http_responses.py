"""/v1/responses as OpenAI's client reads it: the object, the order of the events, and refusals."""

from typing import Any

import httpx
import openai
import pytest

from services.gateway.api import ChatMessage
from services.runtime import errors

from .conftest import TEXTS, FakeGenerator

MODEL = "org/tiny"


async def test_a_response_has_the_text_and_the_usage(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    response = await client.responses.create(
        model=MODEL,
        input="What is a block?",
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        store=False,
        metadata={"a": "b"},
    )
    assert (response.status, response.output_text) == ("completed", "".join(TEXTS))
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 3)
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
    (request,) = generator.requests
    assert request.prompt == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "What is a block?"),
    )
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0.5)


async def test_format_of_the_text_is_repeated(client: openai.AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    response = await client.responses.create(model=MODEL, input="Hi", text={"format": wanted})
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == wanted


async def test_a_conversation_goes_on_with_the_output_items(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """A client appends the output of a response to its next input, as the API's documentation
    does."""
    first = await client.responses.create(model=MODEL, input="Hi")
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ]
    await client.responses.create(model=MODEL, input=items)
    assert generator.requests[-1].prompt == (
        ChatMessage("developer", "Be brief."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "".join(TEXTS)),
        ChatMessage("user", "Go on"),
    )


async def test_the_events_of_a_stream_come_in_order(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(TEXTS),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "".join(
        TEXTS
    )
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "".join(TEXTS)
    assert last.response.usage is not None


async def test_events_are_named_and_nothing_follows_the_last(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/responses", json={"input": "Hi", "stream": True})
    events = answer.text.strip().split("\n\n")
    assert events[0].startswith("event: response.created\ndata: {")
    assert events[-1].startswith("event: response.completed\ndata: {")


async def test_an_error_in_a_stream_is_raised_by_the_client(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    generator.error, generator.error_at = errors.Unavailable("the worker was lost"), 2
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="the worker was lost"):  # noqa: PT012
        async for event in stream:
            seen.append(event.type)
    assert seen[-1] == "response.output_text.delta"


async def test_a_limit_makes_the_response_incomplete(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.finish_reason = "length"
    response = (await http.post("/v1/responses", json={"input": "Hi"})).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
