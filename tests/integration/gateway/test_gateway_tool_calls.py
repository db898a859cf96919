"""Tool calls and reasoning over HTTP, with OpenAI's own client; the workers generate the test's
text."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from services.gateway.frontend.api import ChatMessage, Delta, Received, RequestedTools
from services.gateway.frontend.http.app import create_app
from services.gateway.frontend.http.server import http_server
from services.gateway.parsing.parts import Part, joined

from . import fakes
from .conftest import Call, GatewayHarness, asked, write_model
from .fakes import decode, prefill

pytestmark = pytest.mark.usefixtures("script")

TEMPLATE = """
{%- if tools %}{% for tool in tools %}tool {{ tool | tojson }}\n{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}
{%- for call in m.tool_calls or [] %} calls {{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value | tojson }}
{%- endfor %}{% endfor %}\n{% endfor %}
{#- <think> </think> <tool_call> #}
##{% if thinks %}<think>\n{% endif %}"""
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Weather of <|city|>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
SAID = (
    "<think>\nThe user asks.\n</think>\n\nLook:\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Genève"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>END'
)
USER: Any = [{"role": "user", "content": "What is the weather?"}]


class Script:
    """The text of every worker: `text` after a prompt, which ends with ##."""

    def __init__(self, model_dir: Path) -> None:
        self.text = SAID
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def next_token(self, tokens: Sequence[int], index: int = 0) -> int:
        end = bytes(tokens).rfind(b"##") + 2
        token_ids: list[int] = self.tokenizer.encode(self.text).ids
        return token_ids[len(tokens) - end]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Script:
    script = Script(model_dir)
    for module in (prefill, decode):
        monkeypatch.setattr(module, "next_token", script.next_token)
    return script


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
async def harness(make_harness: Callable[..., Awaitable[GatewayHarness]]) -> GatewayHarness:
    return await make_harness(fakes.prefill.FakePrefill(), fakes.decode.FakeDecode())


@pytest.fixture
async def client(harness: GatewayHarness) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(harness.gateway, harness.request_metrics)
    async with http_server(app, "127.0.0.1", 0, grace_s=1) as port:
        transport = openai.DefaultAsyncHttpxClient(timeout=10, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            http_client=transport,
        ) as client:
            yield client


def parts_of(deltas: Sequence[Delta]) -> tuple[Part, ...]:
    return joined([part for delta in deltas for part in delta.parts or ()])


def fields(**more: Any) -> Any:
    return {"model": "toy", "messages": USER, "stop": "END", "tools": TOOLS} | more


async def test_a_whole_answer_has_the_calls(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**fields())
    (choice,) = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "Look:")
    assert message.model_extra == {"reasoning_content": "The user asks."}
    assert message.tool_calls is not None
    called = [(each.function.name, each.function.arguments) for each in message.tool_calls]
    assert called == [("get_weather", '{"city": "Genève"}'), ("get_time", "{}")]
    assert len({each.id for each in message.tool_calls}) == 2


async def test_a_streamed_answer_has_openais_shape(client: openai.AsyncOpenAI) -> None:
    """Each call begins with its index, id, type and name; pieces of its arguments follow."""
    stream = await client.chat.completions.create(**fields(stream=True))
    choices = [part.choices[0] async for part in stream]
    deltas = [choice.delta.model_dump(exclude_unset=True) for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    joined = {"content": "", "reasoning_content": ""}
    starts, arguments = [], ["", ""]
    for delta in deltas[1:]:
        (name, value), *others = delta.items() or [("content", "")]
        assert not others
        if name in joined:
            joined[name] += value
            continue
        (call,) = value
        if "id" in call:
            assert list(call) == ["index", "id", "function", "type"]
            assert call["function"]["arguments"] == ""
            starts.append((call["index"], call["function"]["name"], call["type"]))
        else:
            assert (set(call), set(call["function"])) == ({"index", "function"}, {"arguments"})
            arguments[call["index"]] += call["function"]["arguments"]
    assert joined == {"content": "Look:", "reasoning_content": "The user asks."}
    assert starts == [(0, "get_weather", "function"), (1, "get_time", "function")]
    assert arguments == ['{"city": "Genève"}', "{}"]
    assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
    assert choices[-1].finish_reason == "tool_calls"


async def test_openais_stream_helper_collects_the_calls(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(**fields()) as stream:
        done = [e async for e in stream if e.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("get_weather", {"city": "Genève"}),
        ("get_time", {}),
    ]


async def test_tools_and_earlier_calls_are_in_the_prompt(
    client: openai.AsyncOpenAI, script: Script
) -> None:
    script.text = "It is warm.END"
    answer = await client.chat.completions.create(**fields())
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == ("It is warm.", None)
    script.text = SAID
    first = (await client.chat.completions.create(**fields())).choices[0].message
    assert first.tool_calls is not None
    said: Any = [
        *USER,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "12 degrees"},
    ]
    script.text = "It is 12 degrees.END"
    answer = await client.chat.completions.create(**fields(messages=said))
    assert answer.choices[0].message.content == "It is 12 degrees."
    body = {"messages": said, "tools": TOOLS}
    tokenized: Any = await client.post("../tokenize", body=body, cast_to=object)
    prompt = script.tokenizer.decode(tokenized["tokens"])
    assert '"city": {"type": "string"}' in prompt.split("user:")[0]
    called = ' calls get_weather city="Genève" calls get_time'
    assert "assistant: Look: (The user asks.)" + called in prompt
    assert "tool: 12 degrees" in prompt


async def test_calls_are_text_if_none_may_be_made(client: openai.AsyncOpenAI) -> None:
    for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        answer = await client.chat.completions.create(**fields(**more))
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == SAID[SAID.index("Look") :].removesuffix("END")


async def test_reasoning_can_be_left_out_or_begun_by_the_prompt(
    client: openai.AsyncOpenAI, script: Script
) -> None:
    answer = await client.chat.completions.create(**fields(extra_body={"include_reasoning": False}))
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == ("Look:", {})
    script.text = "<think>\nHm.\n</think>\n\nYes.END"
    thinks = {"chat_template_kwargs": {"thinks": True}}
    answer = await client.chat.completions.create(**fields(extra_body=thinks))
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == ("Yes.", {"reasoning_content": "Hm."})


async def test_a_cut_call_ends_with_length(client: openai.AsyncOpenAI, script: Script) -> None:
    end = SAID.index("Gen") + 3
    answer = await client.chat.completions.create(**fields(max_tokens=end))
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Gen'


async def test_a_continued_stream_has_the_same_parts(
    harness: GatewayHarness, script: Script
) -> None:
    """Wherever it breaks, the parts of both calls together are those of one."""
    request = asked(
        prompt=(ChatMessage("user", "Hi"),),
        wants_parts=True,
        max_tokens=len(SAID.encode()),
        tools=RequestedTools(tuple(TOOLS)),
    )
    whole = Call(harness.gateway, request)
    await whole.result()
    for number in range(1, len(whole.deltas), 7):
        before, after = whole.deltas[:number], whole.deltas[number:]
        token_ids = tuple(token for delta in before for token in delta.token_ids)
        continued = Call(harness.gateway, replace(request, received=(Received(0, token_ids),)))
        await continued.result()
        assert parts_of(continued.deltas) == parts_of(after)


FORCED: Any = [{"type": "function", "function": {"name": "get_time"}}, "required"]


@pytest.mark.parametrize("choice", FORCED)
async def test_a_forced_call_has_a_form_of_its_own(client: openai.AsyncOpenAI, choice: Any) -> None:
    """Other tests check what workers do with the grammar."""
    answer = await client.chat.completions.create(**fields(tool_choice=choice))
    assert answer.choices[0].finish_reason == "tool_calls"
    with pytest.raises(openai.BadRequestError, match="forces a call") as refused:
        await client.chat.completions.create(
            **fields(tool_choice=choice, response_format={"type": "json_object"})
        )
    assert refused.value.param == "tool_choice"
    wrong = {"name": "get_time", "parameters": {"type": "nothing"}}
    tools = [{"type": "function", "function": wrong}]
    with pytest.raises(openai.BadRequestError, match="structured output"):
        await client.chat.completions.create(**fields(tool_choice="required", tools=tools))


async def test_tools_need_a_template_and_a_format(
    make_harness: Callable[..., Awaitable[GatewayHarness]], model_dir: Path
) -> None:
    async def refusal(template: str) -> str:
        (model_dir / "chat_template.jinja").write_text(template)
        harness = await make_harness(fakes.prefill.FakePrefill(), fakes.decode.FakeDecode())
        app = create_app(harness.gateway, harness.request_metrics)
        async with (
            http_server(app, "127.0.0.1", 0, grace_s=1) as port,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
            ) as client,
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**fields())
        return str(refused.value)

    assert "has no place for tools" in await refusal("{{ messages }}##")
    assert "--tool-call-parser" in await refusal("{{ messages }}{{ tools }}##")
