"""Messages and items of earlier turns, as clients send them, and what the chat template gets."""

from typing import Any

import pytest

from services.gateway.api import ChatMessage
from services.gateway.http.bodies.messages import assistant_fields
from services.gateway.http.bodies.reading import checked
from services.gateway.http.bodies.schema import ChatBody
from services.gateway.http.responses_api.body import ResponsesBody

REASONED = assistant_fields((), "Hm")


def chat_message(**fields: Any) -> ChatMessage:
    (request,) = checked({"messages": [fields]}, ChatBody).requests("r")
    (message,) = tuple(request.prompt)
    assert isinstance(message, ChatMessage)
    return message


def conversation(*items: dict[str, Any]) -> tuple[Any, ...]:
    (request,) = checked({"input": list(items)}, ResponsesBody).requests("r")
    return tuple(request.prompt)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("Hi", "Hi"),
        ([], ""),
        (["a", "b"], "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "No"}], "No"),
        ([{"type": "text", "text": "a", "annotations": [], "cache_control": {}, "x": 1}], "a"),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}], "a"),
    ],
)
def test_content_is_text_or_parts(content: Any, text: str) -> None:
    for role in ("user", "assistant", "tool", "system"):
        assert chat_message(role=role, content=content) == ChatMessage(role, text)


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_message_may_have_no_content(role: str) -> None:
    assert chat_message(role=role) == ChatMessage(role, "")
    assert chat_message(role=role, tool_calls=[], name=None) == ChatMessage(role, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "Hm"},
        {"reasoning_content": "Hm"},
        {"thinking": "Hm"},
        {"content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}]},
        {"content": [{"type": "reasoning", "text": "Hm"}]},
    ],
)
def test_reasoning_of_a_message_has_several_names(fields: dict[str, Any]) -> None:
    expected = ChatMessage("assistant", "", fields=REASONED)
    assert chat_message(role="assistant", **fields) == expected


def test_refusal_is_what_the_message_says() -> None:
    expected = ChatMessage("assistant", "No")
    assert chat_message(role="assistant", content=None, refusal="No") == expected


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(["refusal", "annotations", "audio", "function_call", "tool_calls", "parsed"]),
        {"id": "m1", "provider_specific_fields": {"a": 1}, "timestamp": 1, "images": []},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        {"thinking_blocks": None, "cache_control": {"type": "ephemeral"}, "index": 0},
        {"tool_call_id": "c"},
    ],
)
def test_fields_of_other_servers_are_ignored(fields: dict[str, Any]) -> None:
    message = chat_message(role="assistant", content="Hi", **fields)
    assert message == ChatMessage("assistant", "Hi")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ('"{\\"x\\": 1}"', {"x": 1}),
        ("", {}),
        ('{"x": ', {}),
        ("[1]", {}),
        ("7", {}),
        ("null", {}),
        (None, {}),
        ([1], {}),
        (7, {}),
        ('"x"', {}),
    ],
)
def test_arguments_are_an_object(arguments: Any, expected: dict[str, Any]) -> None:
    function = {"name": "a name with spaces", "arguments": arguments}
    call = {"index": 0, "id": "c", "type": "function", "function": function}
    message = chat_message(role="assistant", tool_calls=[call])
    assert message.fields["tool_calls"] == [
        {"id": "c", "type": "function", "function": {**function, "arguments": expected}}
    ]
    item = {"type": "function_call", "call_id": "c", **function}
    assert conversation(item) == (message,)


def test_items_of_codex_are_a_conversation() -> None:
    """As its later requests have them: reasoning with and without words, phases, and calls."""
    said = {"type": "message", "role": "assistant", "phase": "commentary", "id": None}
    call = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c"}
    prompt = conversation(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {**said, "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "item_reference", "id": "rs_1"},
        {**call, "async_": None, "caller": None, "namespace": None},
        {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "S"}],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
            "encrypted_content": None,
        },
        {**said, "content": [{"type": "refusal", "refusal": "No"}], "phase": "final_answer"},
    )
    assert [(each.role, each.content) for each in prompt] == [
        ("developer", "D"),
        ("user", "U"),
        ("assistant", "I look"),
        ("tool", "a.txt"),
        ("assistant", "No"),
    ]
    assert prompt[2].fields["tool_calls"][0]["function"] == {"name": "shell", "arguments": {}}
    assert prompt[4].fields == REASONED


def test_body_of_codex_is_taken() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "shell", "strict": False}]
    body = {
        "input": [{"type": "message", "role": "user", "content": "Hi"}],
        **{"model": "m", "instructions": "You are Codex.", "tools": tools, "tool_choice": "auto"},
        **{"parallel_tool_calls": False, "store": True, "stream": True, "max_tool_calls": 5},
        **{"truncation": "auto", "prompt_cache_key": "k", "text": {"verbosity": "low"}},
        "reasoning": {"effort": "medium", "summary": "auto"},
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"x-codex-installation-id": "i"},
    }
    (request,) = checked(body, ResponsesBody).requests("r")
    assert request.template_arguments == {"reasoning_effort": "medium"}
    assert request.tools is not None
    assert request.tools.names == ("shell",)
