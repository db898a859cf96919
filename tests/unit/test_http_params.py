"""The field that a refusal of a body names in `param`."""

from typing import Any

import pytest

from services.gateway.http.bodies.fields import Body
from services.gateway.http.bodies.reading import checked
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.tokens import TokenizeBody
from services.gateway.workers.models.structures import STRUCTURE
from services.runtime.errors import InvalidRequest

TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
JSON_FORMAT = {"type": "json_object"}
CALL = {"id": "c", "function": {"name": "f", "arguments": ""}}


def tools(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **fields}]}


def refusal(body: type[Body], fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        checked(fields, body)
    return caught.value


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("beam_width", {"beam_width": 3}),
        ("length_penalty", {"length_penalty": 2.0}),
        ("best_of", {"best_of": 3}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("max_completion_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        (
            "structured_outputs",
            {"structured_outputs": {"regex": "a"}, "response_format": JSON_FORMAT},
        ),
        ("received", {"received": [{"index": 0, "token_ids": [1]}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "g"}}}),
        ("tools[0].function.name", tools(name="a b")),
        ("tools[0].function.parameters", tools(name="f", parameters=3)),
        ("messages[0].content", message(content=[{"type": "image_url"}])),
        ("messages[0].tool_calls", message(content="", tool_calls=[CALL])),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"\N{ARABIC-INDIC DIGIT FIVE}": 1}}),
        ("logit_bias", {"logit_bias": {"9" * 5000: 1}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "sometimes"}),
        ("n", {"n": "2"}),
    ],
)
def test_refused_chat_names_the_field_at_fault(param: str, fields: dict[str, Any]) -> None:
    assert refusal(ChatBody, CHAT | fields).param == param


@pytest.mark.parametrize(
    ("body", "param", "fields"),
    [
        (ResponsesBody, "tool_choice", {"input": "Hi", "tool_choice": "required"}),
        (ResponsesBody, "previous_response_id", {"input": "Hi", "previous_response_id": "r"}),
        *(
            (ResponsesBody, "input[0]", {"input": [{"type": kind, name: None, **others}]})
            for kind, name, others in (
                ("function_call", "name", {"call_id": "c", "arguments": "{}"}),
                ("function_call_output", "call_id", {"output": "x"}),
                ("message", "role", {"content": "Hi"}),
                ("item_reference", "id", {}),
            )
        ),
        (TokenizeBody, "prompt", {}),
        (TokenizeBody, "tools", TEXT | {"tools": [TOOL]}),
        (TokenizeBody, "add_special_tokens", CHAT | {"add_special_tokens": True}),
    ],
)
def test_other_refused_body_names_the_field_at_fault(
    body: type[Body], param: str, fields: dict[str, Any]
) -> None:
    assert refusal(body, fields).param == param


def test_text_of_a_refusal_names_a_field_once() -> None:
    error = refusal(ChatBody, CHAT | {"stream_options": {}})
    assert str(error) == "stream_options is for requests with stream=true"


@pytest.mark.parametrize(
    ("body", "fields", "name"),
    [
        (ChatBody, CHAT | {"response_format": JSON_FORMAT}, "response_format"),
        (CompletionBody, TEXT | {"response_format": JSON_FORMAT}, "response_format"),
        (ResponsesBody, {"input": "Hi", "text": {"format": JSON_FORMAT}}, "text.format"),
        (ChatBody, CHAT, STRUCTURE),
    ],
)
def test_structured_output_is_named_as_the_body_names_it(
    body: type[ChatBody], fields: dict[str, Any], name: str
) -> None:
    assert checked(fields, body).names.get(STRUCTURE, STRUCTURE) == name
