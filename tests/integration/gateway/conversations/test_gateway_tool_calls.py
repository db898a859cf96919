"""Tool calls and reasoning over HTTP, with OpenAI's own client; the workers generate the test's
text."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.api import ChatMessage, RequestedTools
from services.gateway.output.delta import Delta, Received
from services.gateway.output.parser.parts import Part, joined
from tests.integration.gateway import fakes
from tests.integration.gateway.conftest import Call, GatewayHarness, asked

from .conftest import TEXT, TOOLS, USER, Script, openai_client

pytestmark = pytest.mark.usefixtures("script")


def parts_of(deltas: Sequence[Delta]) -> tuple[Part, ...]:
    return joined([part for delta in deltas for part in delta.parts or ()])


def fields(**more: Any) -> Any:
    return {"model": "toy", "messages": USER, "stop": "END", "tools": TOOLS} | more


REASONING = dict.fromkeys(("reasoning", "reasoning_content"), "The user asks.")
"""vLLM's two names, the newer one first."""


async def test_a_whole_answer_has_the_calls(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**fields())
    (choice,) = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "Look:")
    assert message.model_extra == REASONING
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
    joined = {"content": "", "reasoning": "", "reasoning_content": ""}
    starts, arguments = [], ["", ""]
    for delta in deltas[1:]:
        if "tool_calls" not in delta:
            assert set(delta) in (set(), {"content"}, set(REASONING))
            for name, value in delta.items():
                joined[name] += value
            continue
        assert set(delta) == {"tool_calls"}
        (call,) = delta["tool_calls"]
        if "id" in call:
            assert list(call) == ["index", "id", "function", "type"]
            assert call["function"]["arguments"] == ""
            starts.append((call["index"], call["function"]["name"], call["type"]))
        else:
            assert (set(call), set(call["function"])) == ({"index", "function"}, {"arguments"})
            arguments[call["index"]] += call["function"]["arguments"]
    assert joined == {"content": "Look:", **REASONING}
    assert starts == [(0, "get_weather", "function"), (1, "get_time", "function")]
    assert arguments == ['{"city": "Genève"}', "{}"]
    assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
    assert choices[-1].finish_reason == "tool_calls"


async def test_tools_and_earlier_calls_are_in_the_prompt(
    client: openai.AsyncOpenAI, script: Script
) -> None:
    script.text = "It is warm.END"
    answer = await client.chat.completions.create(**fields())
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == ("It is warm.", None)
    script.text = TEXT
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
        assert choice.message.content == TEXT[TEXT.index("Look") :].removesuffix("END")


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
    assert (message.content, message.model_extra) == ("Yes.", dict.fromkeys(REASONING, "Hm."))


async def test_a_cut_call_ends_with_length(client: openai.AsyncOpenAI, script: Script) -> None:
    end = TEXT.index("Gen") + 3
    answer = await client.chat.completions.create(**fields(max_tokens=end))
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Gen'


async def test_a_stop_string_within_a_call_ends_with_stop(client: openai.AsyncOpenAI) -> None:
    """The client must not run a call that is cut, not even if calls before it are complete."""
    for stop, reason in (("nève", "stop"), ("{}}", "stop"), ("</tool_call>", "tool_calls")):
        answer = await client.chat.completions.create(**fields(stop=stop))
        choice = answer.choices[0]
        assert (choice.finish_reason, bool(choice.message.tool_calls)) == (reason, True)
        stream = await client.chat.completions.create(**fields(stop=stop, stream=True))
        assert [part async for part in stream][-1].choices[0].finish_reason == reason


async def test_a_continued_stream_has_the_same_parts(
    harness: GatewayHarness, script: Script
) -> None:
    """Wherever it breaks, the parts of both calls together are those of one."""
    request = asked(
        prompt=(ChatMessage("user", "Hi"),),
        wants_parts=True,
        max_tokens=len(TEXT.encode()),
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
    """Other tests check what workers do with the grammar. A format is for the text only."""
    for more in ({}, {"response_format": {"type": "json_object"}}):
        answer = await client.chat.completions.create(**fields(tool_choice=choice, **more))
        assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_wrong_schema_of_a_function_is_named_with_its_path(
    client: openai.AsyncOpenAI, choice: str
) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    wrong = {"type": "object", "properties": {"all": {"type": "boolean"}, "x": numbers}}
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
        for name, schema in (("f", {"type": "object"}), ("g", wrong))
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**fields(tool_choice=choice, tools=tools))
    assert refused.value.param == "tools"
    assert refused.value.message.endswith(
        "tools[1].function.parameters.properties.x cannot be compiled: "
        'Unimplemented keys: ["uniqueItems"]'
    )


async def test_tools_need_a_template_and_a_format(
    make_harness: Callable[..., Awaitable[GatewayHarness]], model_dir: Path
) -> None:
    async def answer(template: str, **more: Any) -> str:
        (model_dir / "chat_template.jinja").write_text(template)
        harness = await make_harness(fakes.prefill.FakePrefill(), fakes.decode.FakeDecode())
        async with harness.http() as http, openai_client(http) as client:
            try:
                answer = await client.chat.completions.create(**fields(**more))
            except openai.BadRequestError as error:
                return str(error)
            return str(answer.choices[0].finish_reason)

    no_place = "{{ messages }}##"
    assert "has no place for tools" in await answer(no_place)
    assert await answer(no_place, tool_choice="none") == "stop"
    assert "--tool-call-parser" in await answer("{{ messages }}{{ tools }}##")


# ── /v1/responses ────────────────────────────────────────────────────────────────────────────────

FLAT: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]


def asked_for(**more: Any) -> Any:
    return {"model": "toy", "input": USER, "tools": FLAT, "extra_body": {"stop": "END"}} | more


def items_of(output: Sequence[Any]) -> list[tuple[str, ...]]:
    """Each item: its type, and what it says."""
    found: list[tuple[str, ...]] = []
    for item in output:
        match item.type:
            case "function_call":
                found.append((item.type, item.name, item.arguments))
            case _:
                found.append((item.type, *(part.text for part in item.content)))
    return found


ITEMS = [
    ("reasoning", "The user asks."),
    ("message", "Look:"),
    ("function_call", "get_weather", '{"city": "Genève"}'),
    ("function_call", "get_time", "{}"),
]
NUM_REASONING_TOKENS = len("\nThe user asks.\n</think")
"""A token a character. The tag ends with its last one."""


async def test_a_response_has_an_item_for_each_part(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(**asked_for(parallel_tool_calls=True))
    assert items_of(response.output) == ITEMS
    assert response.status == "completed"
    assert {item.status for item in response.output} == {"completed"}
    assert len({item.id for item in response.output}) == len(ITEMS)
    assert [tool.name for tool in response.tools] == ["get_weather", "get_time"]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS
    single = await client.responses.create(**asked_for(parallel_tool_calls=False))
    assert items_of(single.output) == ITEMS[:3]


async def test_the_events_of_a_response_follow_its_items(client: openai.AsyncOpenAI) -> None:
    """OpenAI's own accumulator takes them, and joins the deltas to what the last event has."""
    async with client.responses.stream(**asked_for()) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert items_of(final.output) == ITEMS
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens == NUM_REASONING_TOKENS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [e.item for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [item.type for item in added] == [item[0] for item in ITEMS]
    assert [event.output_index for event in done] == list(range(len(ITEMS)))
    assert items_of([event.item for event in done]) == ITEMS
    deltas = [""] * len(ITEMS)
    said: list[Any] = [event for event in events if event.type.endswith(".delta")]
    for event in said:
        deltas[event.output_index] += event.delta
    assert deltas == [item[-1] for item in ITEMS]
    ends = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in ends] == [item[2] for item in ITEMS[2:]]
    kinds = [e.type for e in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


@pytest.mark.parametrize("choice", [{"type": "function", "name": "get_time"}, "required", "none"])
async def test_a_response_obeys_the_tool_choice(client: openai.AsyncOpenAI, choice: Any) -> None:
    response = await client.responses.create(**asked_for(tool_choice=choice))
    kinds = [item.type for item in response.output]
    assert ("function_call" in kinds) is (choice != "none")
    chosen = response.tool_choice
    assert (chosen if isinstance(chosen, str) else chosen.model_dump()) == choice


async def test_a_stop_string_within_a_call_leaves_its_item_incomplete(
    client: openai.AsyncOpenAI,
) -> None:
    response = await client.responses.create(**asked_for(extra_body={"stop": "nève"}))
    call = response.output[-1]
    assert call.type == "function_call"
    assert (call.status, call.arguments) == ("incomplete", '{"city": "Ge')
    assert response.status == "completed"


async def test_a_cut_call_leaves_its_response_incomplete(client: openai.AsyncOpenAI) -> None:
    end = TEXT.index("Gen") + 3
    response = await client.responses.create(**asked_for(max_output_tokens=end))
    assert response.status == "incomplete"
    call = response.output[-1]
    assert call.type == "function_call"
    assert (call.status, call.arguments) == ("incomplete", '{"city": "Gen')
