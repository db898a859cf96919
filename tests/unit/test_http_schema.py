"""Request bodies, and the requests that the gateway gets from them."""

from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Message

from quire.types import Beam
from services.gateway.api import (
    ChatMessage,
    GenerationRequest,
    RequestedSampling,
    RequestedTools,
    ToolChoice,
    Truncation,
)
from services.gateway.http.bodies.reading import read_body
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.embeddings import EmbeddingBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.runtime.errors import InvalidRequest

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHOICE = {"type": "function", "function": {"name": "f"}}


async def problem(model: type[CompletionBody | ChatBody], body: bytes) -> str:
    """The error with which a body is refused."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    with pytest.raises(InvalidRequest) as caught:
        await read_body(Request({"type": "http"}, receive), model)
    return str(caught.value)


def chat(**fields: Any) -> GenerationRequest:
    (request,) = ChatBody.model_validate({"messages": USER, **fields}).requests("r")
    return request


def test_every_field_arrives() -> None:
    body = CompletionBody.model_validate_json("""{
        "model": "tiny", "prompt": "Hi", "max_tokens": 5, "temperature": 1, "top_p": 0.5,
        "top_k": -1, "min_p": 0.1, "seed": 18446744073709551615, "stop": ["a", "b"],
        "stop_token_ids": [7], "ignore_eos": true, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"9": 1, "8": -2.5},
        "allowed_token_ids": [9, 8], "bad_words": ["x"], "min_tokens": 2,
        "include_stop_str_in_output": true, "skip_special_tokens": false, "n": 2, "priority": -3,
        "cache_salt": "s", "user": "u"
    }""")
    assert body.requests("r") == [
        GenerationRequest(
            prompt="Hi",
            request_id="r",
            model="tiny",
            sampling=RequestedSampling(
                1.0,
                -1,
                0.5,
                0.1,
                2**64 - 1,
                5,
                ("a", "b"),
                (7,),
                True,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=-1.0,
                logit_bias={8: -2.5, 9: 1.0},
                allowed_token_ids=(9, 8),
                bad_words=("x",),
                min_tokens=2,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                n=2,
                default_max_tokens=16,
            ),
            priority=-3,
            cache_salt="s",
        )
    ]


def test_null_is_as_good_as_absent() -> None:
    names = CompletionBody.model_fields.keys() - {"prompt"}
    body = CompletionBody.model_validate({"prompt": "Hi", **dict.fromkeys(names)})
    sampling = RequestedSampling(default_max_tokens=16)
    assert body.requests("r") == [GenerationRequest("Hi", "r", sampling=sampling)]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        ([[1], "b"], [(1,), "b"]),
        ([], [()]),
    ],
)
def test_prompts_are_text_or_token_ids_or_several(prompt: object, prompts: list[object]) -> None:
    requests = CompletionBody.model_validate({"prompt": prompt}).requests("r")
    assert [request.prompt for request in requests] == prompts
    assert len({request.request_id for request in requests}) == len(requests)


@pytest.mark.parametrize("prompt", [None, 7, [True], [1.5], ["a", 1], [[["a"]]], {}, ["a"] * 129])
def test_other_types_are_no_prompts(prompt: object) -> None:
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": prompt})


def test_a_chat_template_gets_its_arguments() -> None:
    kwargs = {"enable_thinking": False, "style": ["short"]}
    given = chat(chat_template_kwargs=kwargs, reasoning_effort="low").template_arguments
    assert given == {**kwargs, "reasoning_effort": "low"}
    assert chat().template_arguments == {}


def test_a_text_completion_has_16_tokens_unless_it_says_how_many() -> None:
    (request,) = CompletionBody.model_validate({"prompt": "Hi"}).requests("r")
    assert request.sampling.default_max_tokens == 16
    assert chat().sampling.default_max_tokens is None


@pytest.mark.parametrize(
    ("limits", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_the_limit_has_two_names(limits: dict[str, int], max_tokens: int | None) -> None:
    assert chat(**limits).sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b"[" * 60_000, b'{"prompt": "\\ud800"}'),
        *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": -Infinity}'),
    ],
)
async def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    assert (await problem(CompletionBody, body)).startswith("the body is not ")


@pytest.mark.parametrize("number", [5, 5.0])
def test_whole_number_may_have_a_fraction_of_0(number: float) -> None:
    assert chat(max_tokens=number).sampling.max_tokens == 5


def test_tools_and_results_reach_the_chat_template() -> None:
    messages = [*USER, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    request = chat(messages=messages, tools=TOOLS, parallel_tool_calls=False)
    assert tuple(request.prompt)[1] == ChatMessage("tool", "2", fields={"tool_call_id": "c1"})
    assert request.tools == RequestedTools(tuple(TOOLS), parallel=False)
    assert request.wants_parts


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (ToolChoice.AUTO, None)),
        ("none", (ToolChoice.NONE, None)),
        ("required", (ToolChoice.REQUIRED, None)),
        (CHOICE, (ToolChoice.AUTO, "f")),
    ],
)
def test_the_choice_of_tools_arrives(choice: Any, expected: tuple[ToolChoice, str | None]) -> None:
    tools = chat(tools=TOOLS, tool_choice=choice).tools
    assert tools is not None
    assert (tools.choice, tools.function) == expected


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_count(mode: str) -> None:
    names = ("f", "g", "h")
    offered = [{"type": "function", "function": {"name": name}} for name in names]
    tools: list[Any] = [*offered[2:0:-1], {"type": "mcp", "server_label": "s"}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    asked = chat(tools=offered, tool_choice=choice).tools
    assert asked == RequestedTools(tuple(offered[1:]), ToolChoice(mode))
    flat: list[Any] = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [*flat[2:0:-1], tools[-1]]}
    body = ResponsesBody.model_validate({"input": "Hi", "tools": flat, "tool_choice": choice})
    assert body.requests("r")[0].tools == asked


async def test_number_of_thousands_of_digits_is_refused_by_its_field() -> None:
    body = b'{"prompt": "x", "max_tokens": ' + b"9" * 4300 + b"}"
    assert "max_tokens" in await problem(CompletionBody, body)


def test_texts_are_truncated_at_the_side_that_their_use_needs_least() -> None:
    cut: dict[str, Any] = {"truncate_prompt_tokens": 5}
    assert chat(**cut).truncation == Truncation(5, "left")
    assert chat(**cut, truncation_side="right").truncation == Truncation(5, "right")
    (request,) = EmbeddingBody.model_validate({"input": "Hi", **cut}).requests("r")
    assert request.truncation == Truncation(5, "right")


def beams(**fields: Any) -> Beam | None:
    body = CompletionBody.model_validate({"prompt": "Hi", **fields})
    return body.requests("r")[0].sampling.beam


def test_a_beam_search_is_as_wide_as_it_says_or_else_as_n() -> None:
    assert beams(n=4) is None
    assert beams(use_beam_search=True, n=4) == Beam(4)
    assert beams(use_beam_search=True, n=2, beam_width=6) == Beam(6)
    assert beams(use_beam_search=True, n=2, length_penalty=0.5, early_stopping="never") == Beam(
        2, 0.5, "never"
    )
    assert beams(use_beam_search=True, n=2, early_stopping=True) == Beam(2, None, True)


@pytest.mark.parametrize("fields", [{"length_penalty": 1}, {"use_beam_search": False}])
def test_beam_parameters_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert beams(**fields) is None


def sampled(body: type[CompletionBody] | type[ChatBody], **fields: Any) -> RequestedSampling:
    given = {"prompt": "Hi"} if body is CompletionBody else {"messages": USER}
    return body.model_validate({**given, **fields}).requests("r")[0].sampling


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_a_best_of_one_may_be_said(body: type[CompletionBody] | type[ChatBody]) -> None:
    assert sampled(body, best_of=1).n == 1
