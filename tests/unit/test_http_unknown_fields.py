"""Fields that Quire does not know are ignored, unless they would change the tokens."""

from typing import Any

import pytest

from services.gateway.http.bodies.fields import Body
from services.gateway.http.bodies.reading import checked
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.embeddings import EmbeddingBody
from services.gateway.http.messages_api.body import CountTokensBody, MessagesBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.scoring import RerankBody, ScoreBody
from services.gateway.http.tokens import TokenizeBody
from services.runtime.errors import InvalidRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: list[tuple[type[Any], dict[str, Any]]] = [
    (ChatBody, CHAT),
    (CompletionBody, {"prompt": "Hi"}),
    (ResponsesBody, {"input": "Hi"}),
    (EmbeddingBody, {"input": "Hi"}),
    (TokenizeBody, {"prompt": "Hi"}),
    (MessagesBody, CHAT | {"max_tokens": 9}),
    (CountTokensBody, CHAT),
    (RerankBody, {"query": "Hi", "documents": ["you"]}),
    (ScoreBody, {"text_1": "Hi", "text_2": "you"}),
]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def asked(body: type[Any], fields: dict[str, Any]) -> Any:
    read = checked(fields, body)
    is_count = isinstance(read, TokenizeBody | CountTokensBody)
    return read.request() if is_count else read.requests("r")


def refusal(body: type[Body], fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        checked(fields, body)
    return caught.value


@pytest.mark.parametrize(("body", "base"), BODIES)
def test_unknown_field_is_ignored(body: type[Any], base: dict[str, Any]) -> None:
    more = {
        "include_obfuscation": True,
        "kv_transfer_params": {"a": 1},
        "metadata": {"run": 1},
        "safety_identifier": "s",
        "service_tier": "flex",
        "spaces_between_special_tokens": True,
        "store": True,
        "tempratur": 1,
        "user": "u",
        "verbosity": "low",
        "web_search_options": {"search_context_size": "low"},
    }
    assert asked(body, base | more) == asked(body, base)


@pytest.mark.parametrize("value", [None, [], {}])
@pytest.mark.parametrize(("body", "base"), BODIES)
def test_unknown_field_without_a_value_is_absent(
    body: type[Any], base: dict[str, Any], value: Any
) -> None:
    more = dict.fromkeys(body.refused.keys() - body.model_fields.keys(), value)
    assert asked(body, base | more) == asked(body, base)


@pytest.mark.parametrize(("body", "base"), BODIES)
def test_unknown_field_that_changes_nothing_is_absent(
    body: type[Any], base: dict[str, Any]
) -> None:
    more = {name: values[0] for name, values in body.refused.items() if values}
    more = {name: value for name, value in more.items() if name not in body.model_fields}
    assert asked(body, base | more) == asked(body, base)


@pytest.mark.parametrize(("body", "base"), BODIES)
def test_unknown_field_that_would_change_the_tokens_is_refused_by_name(
    body: type[Any], base: dict[str, Any]
) -> None:
    for name in body.refused.keys() - body.model_fields.keys():
        error = refusal(body, base | {name: {"a": "value of no other server"}})
        assert error.param == name
        assert str(error).startswith(f"{name} is not supported")


def test_prompt_can_be_without_special_tokens_and_without_a_turn_of_the_model() -> None:
    (text,) = asked(CompletionBody, {"prompt": "Hi", "add_special_tokens": False})
    assert not text.add_special_tokens
    (chat,) = asked(ChatBody, CHAT | {"add_generation_prompt": False, "add_special_tokens": False})
    assert not chat.add_generation_prompt
    assert asked(ChatBody, CHAT | {"add_generation_prompt": True}) == asked(ChatBody, CHAT)


def test_tools_with_extra_keys_are_functions() -> None:
    function = {"name": "f", "returns": {"type": "string"}, "cache_control": {}}
    tool = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    with_extras = asked(ChatBody, CHAT | {"tools": [tool]})
    assert with_extras == asked(ChatBody, CHAT | {"tools": [TOOL]})


def test_of_several_tools_with_one_name_the_last_counts() -> None:
    newer = {"type": "function", "function": {"name": "f", "description": "newer"}}
    twice = asked(ChatBody, CHAT | {"tools": [TOOL, newer, newer]})
    assert twice == asked(ChatBody, CHAT | {"tools": [newer]})


def test_tools_that_are_no_functions_are_left_out() -> None:
    others = [
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    ]
    flat = {"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}}
    for body, base, tool in ((ChatBody, CHAT, TOOL), (ResponsesBody, {"input": "Hi"}, flat)):
        mixed = asked(body, base | {"tools": [*others, tool]})
        assert mixed == asked(body, base | {"tools": [tool]})
        assert asked(body, base | {"tools": others}) == asked(body, base)
