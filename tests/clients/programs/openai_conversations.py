"""openai: whole conversations, in which every object that the client gets is sent back to the
server: as the object that it is, and as a dictionary. Codex' and Cline's requests are played too.

usage: openai_conversations.py URL MODEL. The model's chat template takes tools.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import openai
from openai.lib.streaming._deltas import accumulate_delta
from pydantic import BaseModel

url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Weather(BaseModel):
    """Weather, in JSON."""

    city: Literal["Geneva", "Bern"]
    is_warm: bool


# Each answer is short and complete, whatever the model has learned: OpenAI's client takes no
# answer that a limit has cut.
SHORT: dict[str, Any] = {
    "model": model,
    "temperature": 1,
    "extra_body": {"seed": 1, "stop": ["END"], "structured_outputs": {"choice": ["Yes.", "No."]}},
}
FORMED: dict[str, Any] = {**SHORT, "extra_body": {"seed": 1, "stop": ["END"]}}
ASKED: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "system", "content": [{"type": "text", "text": "You know the weather."}]},
    {"role": "user", "content": "Is it warm?"},
]
GO_ON: Any = {"role": "user", "content": "And now?"}
TOOL: Any = openai.pydantic_function_tool(Weather, name="report")
TOOLS: list[Any] = [TOOL, {**TOOL, "cache_control": {"type": "ephemeral"}}]
FLAT: list[Any] = [{"type": "function", **TOOL["function"]}, {"type": "web_search"}]


def as_dictionaries(objects: Sequence[Any]) -> list[Any]:
    return [one.model_dump() if isinstance(one, BaseModel) else one for one in objects]


# ── chats ────────────────────────────────────────────────────────────────────────────────────────


def created(said: list[Any], **options: Any) -> Any:
    answer = client.chat.completions.create(messages=said, **options)
    return answer.choices[0].message


def summed(said: list[Any], **options: Any) -> Any:
    """The sum of a stream's deltas, as dictionaries."""
    total: dict[object, object] = {}
    for part in client.chat.completions.create(messages=said, stream=True, **options):
        total = accumulate_delta(total, part.choices[0].delta.to_dict())
    return total


def collected(said: list[Any], **options: Any) -> Any:
    with client.chat.completions.stream(messages=said, **options) as stream:
        return stream.get_final_completion().choices[0].message


def parsed(said: list[Any], **options: Any) -> Any:
    return client.chat.completions.parse(messages=said, **options).choices[0].message


def chat() -> None:
    said = list(ASKED)
    for ask in (created, summed, collected, parsed):
        message = ask(said, **SHORT)
        assert not isinstance(message, BaseModel) or message.content, message
        said += [message, GO_ON]
    formed = parsed(said, response_format=Weather, **FORMED)
    assert isinstance(formed.parsed, Weather)
    created([*as_dictionaries(said), formed.model_dump(), GO_ON], **SHORT)


def chat_with_tools() -> None:
    said = list(ASKED)
    for ask in (created, summed, collected, parsed):
        offered = [TOOL] if ask is parsed else TOOLS
        message = ask(said, tools=offered, tool_choice="required", **FORMED)
        calls = as_dictionaries([message])[0]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"report"}
        said += [message, *results(calls)]
        said += [created(said, tools=TOOLS, tool_choice="none", **SHORT), GO_ON]
    created(as_dictionaries(said), **SHORT)


def results(calls: Sequence[Any]) -> Iterator[Any]:
    for number, call in enumerate(calls):
        parts = [{"type": "text", "text": "warm"}, "in the sun"]
        yield {"role": "tool", "tool_call_id": call["id"], "content": parts if number else "warm"}


# ── /v1/responses ────────────────────────────────────────────────────────────────────────────────


def responded(items: list[Any], **options: Any) -> Any:
    return client.responses.create(input=items, **options)


def streamed(items: list[Any], **options: Any) -> Any:
    with client.responses.stream(input=items, **options) as stream:
        return stream.get_final_response()


def parsed_response(items: list[Any], **options: Any) -> Any:
    return client.responses.parse(input=items, **options)


def responses() -> None:
    items = list(ASKED)
    for ask in (responded, streamed, parsed_response):
        response = ask(items, **SHORT)
        assert response.output_text, response
        items += [*response.output, GO_ON]
    formed = parsed_response(items, text_format=Weather, **FORMED)
    assert isinstance(formed.output_parsed, Weather)
    items += [*formed.output, GO_ON]
    responded(as_dictionaries(items), **SHORT)


def responses_with_tools() -> None:
    items = list(ASKED)
    for ask in (responded, streamed, parsed_response):
        offered = FLAT[:1] if ask is parsed_response else FLAT
        response = ask(items, tools=offered, tool_choice="required", **FORMED)
        items += [*response.output, *outputs(response.output), GO_ON]
    responded(as_dictionaries(items), **SHORT)


def outputs(output: Sequence[Any]) -> Iterator[Any]:
    calls = [item for item in as_dictionaries(output) if item["type"] == "function_call"]
    assert calls
    for call in calls:
        yield {"type": "function_call_output", "call_id": call["call_id"], "output": "warm"}


# ── requests of other programs ───────────────────────────────────────────────────────────────────


def codex() -> None:
    """Codex CLI sends its whole history: items without ids, and reasoning without its words."""
    words = [{"type": "input_text", "text": "Is it warm?"}]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": words},
        {"type": "message", "role": "user", "content": words},
    ]
    body: dict[str, Any] = {
        "model": model,
        "instructions": "You are Codex.",
        "tools": [
            *FLAT,
            {"type": "local_shell"},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "5f0f2e8e",
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}, "stop": "END"},
    }
    for _ in range(3):
        stream: Any = client.responses.create(input=items, stream=True, **body)
        done = [event.item for event in stream if event.type == "response.output_item.done"]
        for item in as_dictionaries(done):
            kept = {name: value for name, value in item.items() if name not in ("id", "status")}
            if kept["type"] == "reasoning":
                kept |= {"content": None, "encrypted_content": "gAAAAAB"}
            elif kept["type"] == "message":
                kept["phase"] = "commentary"
            items.append(kept)
        items += outputs(done)


def cline() -> None:
    """Cline sends texts as parts, and the fields of OpenRouter's messages."""
    said: list[Any] = [
        {"role": "system", "content": "You are Cline."},
        {"role": "user", "content": [{"type": "text", "text": "Is it warm?"}]},
    ]
    details = [{"type": "reasoning.text", "text": "Hm", "format": "unknown", "index": 0}]
    for turn in range(3):
        options: dict[str, Any] = {
            **FORMED,
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        if turn == 2:
            options |= {"reasoning_effort": "low", "verbosity": "low", "max_completion_tokens": 500}
        message = summed(said, **options)
        said.append({**message, "reasoning_details": details, "id": "m", "timestamp": 1})
        said += results(message["tool_calls"])
        said.append({"role": "user", "content": [{"type": "text", "text": "Go on", "extra": 1}]})
    said.append({"role": "assistant", "tool_calls": [], "reasoning_content": "Hm"})
    said += [{"role": "system", "content": "Be kind."}, GO_ON]
    created(said, **SHORT)


for play in (chat, chat_with_tools, responses, responses_with_tools, codex, cline):
    play()
