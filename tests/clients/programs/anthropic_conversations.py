"""anthropic: conversations with tools, in which every object that the client gets is sent back: as
the object that it is, and as a dictionary. Requests in the form of Claude Code's are played too.

usage: anthropic_conversations.py URL MODEL. The model's chat template takes tools.
"""

import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

url, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Geneva", "Bern"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOLS: list[Any] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
    {
        "name": "report",
        "description": "Reports the weather. " * 200,
        "input_schema": SCHEMA,
        **CACHED,
    },
]
CODE: dict[str, Any] = {
    "model": model,
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=12ab;"},
        {"type": "text", "text": "You report the weather.", **CACHED},
    ],
    "tools": TOOLS,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "extra_headers": {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
    "extra_body": {"context_management": {"edits": []}, "unknown": 1, "seed": 1},
}


class Weather(BaseModel):
    city: Literal["Geneva", "Bern"]
    warm: bool


def created(said: list[Any], **more: Any) -> Any:
    return client.messages.create(**CODE | more, messages=said, timeout=60)


def streamed(said: list[Any], **more: Any) -> Any:
    with client.messages.stream(**CODE | more, messages=said) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        return stream.get_final_message()


said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Is it warm?", **CACHED}]}]
forced = {"type": "any", "disable_parallel_tool_use": True}
for ask, choice in ((created, forced), (streamed, {"type": "tool", "name": "report"})):
    message = ask(said, tool_choice=choice)
    *_, call = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "report"), (
        message
    )
    assert call.input["city"] in ("Geneva", "Bern")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "no thermometer"}
    said += [
        {"role": "assistant", "content": message.content},
        {
            "role": "user",
            "content": [{**result, "is_error": True}, {"type": "text", "text": "Again."}],
        },
    ]
short = {"max_tokens": 4, "tool_choice": {"type": "none"}}
assert streamed(said, **short).stop_reason == "max_tokens"
plain = [
    {**one, "content": [b.model_dump() if isinstance(b, BaseModel) else b for b in one["content"]]}
    for one in said
]
assert created(plain, **short).usage == created(said, **short).usage
counted = client.messages.count_tokens(
    model=model, messages=said, tools=TOOLS, system=CODE["system"], thinking=CODE["thinking"]
)
usage = created(said, **short).usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
parsed = client.messages.parse(
    model=model, max_tokens=4000, messages=said, output_format=Weather, extra_body={"seed": 1}
)
assert isinstance(parsed.parsed_output, Weather)
