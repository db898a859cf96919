"""/v1/messages: the message, the events of a stream, the translation of conversations, and errors
in Anthropic's form. The clients' tests run Anthropic's own client (`tests/clients`)."""

import json
from typing import Any

import httpx
import pytest

from services.gateway.api import (
    ChatMessage,
    RequestedTools,
    RetainDirective,
    ToolChoice,
)
from services.runtime import errors

from .conftest import TEXTS, FakeGenerator, asking

HI: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
FUNCTION = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 3,
}


def events_of(text: str) -> list[dict[str, Any]]:
    events = [each.split("\n") for each in text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {each['type']}" for each in found]
    return found


async def test_a_message_has_its_ending_and_usage(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    answer = await http.post("/v1/messages", json={**HI, "stop_sequences": ["END"], "top_k": 5})
    message = answer.json()
    assert message.pop("id") == f"msg_{answer.headers['request-id']}"
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "org/tiny",
        "content": [{"type": "text", "text": "".join(TEXTS)}],
        "stop_reason": "stop_sequence",
        "stop_sequence": "END",
        "usage": USAGE,
    }
    (request,) = generator.requests
    assert request.prompt == (ChatMessage("user", "Hi"),)
    sampling = request.sampling
    assert (sampling.default_max_tokens, sampling.stop, sampling.top_k) == (9, ("END",), 5)


@pytest.mark.parametrize(
    ("limit", "reason"), [(3, "max_tokens"), (9, "model_context_window_exceeded")]
)
async def test_a_message_ends_at_its_limit_or_the_contexts(
    http: httpx.AsyncClient, generator: FakeGenerator, limit: int, reason: str
) -> None:
    generator.finish_reason = "length"
    message = (await http.post("/v1/messages", json={**HI, "max_tokens": limit})).json()
    assert message["stop_reason"] == reason


async def test_events_of_a_stream_come_in_order(http: httpx.AsyncClient) -> None:
    events = events_of((await http.post("/v1/messages", json={**HI, "stream": True})).text)
    assert [each["type"] for each in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(TEXTS),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, *_, last, _ = events
    assert start["message"]["usage"] == {**USAGE, "output_tokens": 1}
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert (last["delta"]["stop_reason"], last["usage"]) == ("stop_sequence", USAGE)


async def test_breakpoints_retain_the_conversation_up_to_them(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """Of the prompt's 7 tokens, 4 are retained; the generator had 4 in the cache. A breakpoint of a
    tool, even of one that is left out, is behind the system prompt, which has all tools."""
    generator.num_cached_tokens = 2
    text = {"type": "text", "text": "Hi"}
    body = {
        **HI,
        "system": [{"type": "text", "text": "Be brief.", **CACHED}, {"type": "text", "text": "."}],
        "messages": [{"role": "user", "content": [{**text, **CACHED}, text]}],
        "tools": [TOOL, {"type": "web_search_1", "name": "w", **CACHED}],
        "cache_control": {"type": "ephemeral"},
    }
    usage = (await http.post("/v1/messages", json=body)).json()["usage"]
    brief, system = (ChatMessage("system", each) for each in ("Be brief.", "Be brief.\n."))
    assert generator.requests[0].retain == (
        RetainDirective(3600, until=(system,)),
        RetainDirective(3600, until=(brief,)),
        RetainDirective(3600, until=(system, ChatMessage("user", "Hi"))),
        RetainDirective(300),
    )
    assert [each["ttl"] for each in usage.pop("retained")] == [3600, 3600, 3600, 300]
    created = {"cache_creation_input_tokens": 2, "cache_read_input_tokens": 2}
    assert usage == {**USAGE, **created}


async def test_silence_is_filled_with_pings_and_ends_with_an_error(
    generator: FakeGenerator,
) -> None:
    generator.delay_s, generator.error = 2.0, errors.Unavailable("the worker was lost")
    async with asking(generator, stream_ping_s=0.02) as http:
        answer = await http.post("/v1/messages", json={**HI, "stream": True})
    *pings, last = events_of(answer.text)
    assert pings
    assert all(each == {"type": "ping"} for each in pings)
    error = {"type": "overloaded_error", "message": "the worker was lost"}
    assert last == {"type": "error", "error": error, "request_id": answer.headers["request-id"]}


async def test_a_conversation_becomes_messages_of_a_template(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    body = {
        **HI,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief.", **CACHED},
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", **CACHED}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    call,
                ],
            },
            {
                "role": "user",
                "content": [
                    {**result, "content": [{"type": "text", "text": "gone"}], "is_error": True},
                    {**result, "content": "here"},
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "system", "content": "Mind the time."},
        ],
    }
    assert (await http.post("/v1/messages", json=body)).status_code == 200
    called = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    spoken = {"tool_calls": [called], "reasoning_content": "Hm.", "thinking": "Hm."}
    assert generator.requests[-1].prompt == (
        ChatMessage("system", "Be brief.\nBe kind."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "I look.", fields=spoken),
        ChatMessage("tool", "Error: gone", fields={"tool_call_id": "t1"}),
        ChatMessage("tool", "here", fields={"tool_call_id": "t1"}),
        ChatMessage("user", "Go on."),
        ChatMessage("system", "Mind the time."),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, RequestedTools((FUNCTION,))),
        ({"type": "none"}, RequestedTools((FUNCTION,), ToolChoice.NONE)),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            RequestedTools((FUNCTION,), ToolChoice.REQUIRED, parallel=False),
        ),
        ({"type": "tool", "name": "look"}, RequestedTools((FUNCTION,), function="look")),
    ],
)
async def test_tools_of_the_client_are_functions(
    http: httpx.AsyncClient, generator: FakeGenerator, choice: Any, expected: RequestedTools
) -> None:
    """Tools of Anthropic's servers are left out."""
    tools = [{**TOOL, **CACHED, "eager_input_streaming": True}, {"type": "web_search_20250305"}]
    body = {**HI, "tools": tools, "tool_choice": choice}
    assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert generator.requests[-1].tools == expected


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True},
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_thinking_reaches_the_template(
    http: httpx.AsyncClient, generator: FakeGenerator, fields: Any, arguments: dict[str, Any]
) -> None:
    assert (await http.post("/v1/messages", json=HI | fields)).status_code == 200
    assert generator.requests[-1].template_arguments == arguments


async def test_tokens_are_counted_as_they_would_be_computed(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    body = {"messages": HI["messages"], "system": "Be brief.", "tools": [TOOL], **CACHED}
    answer = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": 2}
    prompt = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    (asked,) = generator.tokenize_requests
    assert (asked.prompt, asked.tools) == (prompt, RequestedTools((FUNCTION,)))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidRequest("stop is wrong", "stop"), 400, "invalid_request_error"),
        (errors.UnknownModel("none"), 404, "not_found_error"),
        (errors.QueueFull("full", 2.0), 429, "rate_limit_error"),
        (errors.NoWorker("none"), 503, "overloaded_error"),
        (errors.DeadlineExceeded("late"), 408, "timeout_error"),
        (ValueError("a bug"), 500, "api_error"),
    ],
)
async def test_errors_have_anthropics_types(
    http: httpx.AsyncClient, generator: FakeGenerator, error: Exception, status: int, kind: str
) -> None:
    generator.error = error
    answer = await http.post("/v1/messages", json=HI)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind)
    assert found["request_id"] == answer.headers["request-id"]
    if status == 400:
        assert found["error"]["message"] == "stop_sequences is wrong"


async def test_the_form_of_shared_paths_is_the_clients(http: httpx.AsyncClient) -> None:
    mine = await http.get("/v1/models/none", headers={"anthropic-version": "2023-06-01"})
    assert (mine.status_code, mine.json()["error"]["type"]) == (404, "not_found_error")
    other = await http.get("/v1/models/none")
    assert other.json()["error"]["code"] == "model_not_found"
    assert "request-id" not in other.headers
