"""Tool calls and reasoning in /v1/messages; the workers generate the test's text."""

import json
from typing import Any

import httpx
import jiter
import pytest

from .conftest import TEXT, TOOLS, Script

pytestmark = pytest.mark.usefixtures("script")

CONTENT = [
    {"type": "thinking", "thinking": "The user asks.", "signature": ""},
    {"type": "text", "text": "Look:"},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Genève"}},
    {"type": "tool_use", "name": "get_time", "input": {}},
]
CACHE_FIELDS = "cache_read_", "cache_creation_"
BODY: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "stop_sequences": ["END"],
    "tools": [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
        for each in TOOLS
    ],
}


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [block["id"] for block in blocks if "id" in block]
    assert len(set(ids)) == len(ids)
    return [{name: block[name] for name in block if name != "id"} for block in blocks]


async def test_a_message_has_thinking_text_and_calls(http: httpx.AsyncClient) -> None:
    message = (await http.post("/v1/messages", json=BODY)).json()
    assert without_ids(message["content"]) == CONTENT
    assert message["stop_reason"] == "tool_use"


async def test_a_stream_has_the_same_blocks_one_after_another(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/messages", json={**BODY, "stream": True})
    blocks: list[dict[str, Any]] = []
    is_open = False
    for line in answer.text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data") else {}
        match event.get("type"):
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open = True
                blocks.append(event["content_block"])
                if "input" in blocks[-1]:
                    assert blocks[-1]["input"] == {}
                    blocks[-1]["input"] = ""
            case "content_block_delta":
                assert is_open
                name = {"text_delta": "text", "thinking_delta": "thinking"}
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    blocks[-1]["input"] += delta["partial_json"]
                else:
                    blocks[-1][name[delta["type"]]] += delta[name[delta["type"]]]
            case "content_block_stop":
                is_open = False
    for block in blocks[2:]:
        block["input"] = json.loads(block["input"])
    assert without_ids(blocks) == CONTENT


async def test_a_cut_call_ends_with_max_tokens(http: httpx.AsyncClient, script: Script) -> None:
    body = {**BODY, "max_tokens": TEXT.index("Gen") + 3}
    message = (await http.post("/v1/messages", json=body)).json()
    assert (message["stop_reason"], message["content"][-1]["input"]) == ("max_tokens", {})


@pytest.mark.parametrize(("stop", "given"), [("nève", {}), ("unit", {"city": "Genève"})])
async def test_a_stop_sequence_may_cut_a_call(
    http: httpx.AsyncClient, script: Script, stop: str, given: dict[str, str]
) -> None:
    """Its input is then what Anthropic's client makes of the stream, with jiter."""
    script.text = TEXT.replace('"Genève"', '"Genève", "unit": "C"')
    body = {**BODY, "stop_sequences": [stop]}
    message = (await http.post("/v1/messages", json=body)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    answer = await http.post("/v1/messages", json={**body, "stream": True})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    *events, ending, _ = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert ending["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    pieces = [event.get("delta", {}).get("partial_json", "") for event in events]
    streamed = jiter.from_json("".join(pieces).encode(), partial_mode=True)
    assert message["content"][-1]["input"] == streamed == given


async def test_a_whole_turn_goes_back(http: httpx.AsyncClient, script: Script) -> None:
    first = (await http.post("/v1/messages", json=BODY)).json()
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "12 degrees"}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    turn = [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    script.text = "It is 12 degrees.END"
    second = await http.post("/v1/messages", json={**BODY, "messages": BODY["messages"] + turn})
    assert second.json()["content"] == [{"type": "text", "text": "It is 12 degrees."}]
    assert second.json()["stop_reason"] == "stop_sequence"


async def test_a_breakpoint_of_the_last_tool_retains_all_tools(http: httpx.AsyncClient) -> None:
    """Two conversations with the same tools retain the same prefix."""
    first, last = BODY["tools"]
    tools = [first, {**last, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    answers = []
    for text in ("What is the weather?", "Is it late?"):
        said = {"messages": [{"role": "user", "content": text}], "tools": tools}
        usage = (await http.post("/v1/messages", json={**BODY, **said})).json()["usage"]
        answers += usage["retained"]
    assert answers[0] == answers[1]
    assert (answers[0]["status"], answers[0]["ttl"]) == ("accepted", 3600)
    num_tokens = answers[0]["asked_tokens"]  # this model has a token for each byte
    num_of_prompt = sum(usage[f"{each}input_tokens"] for each in ("", *CACHE_FIELDS))
    assert num_of_prompt - num_tokens == len("Is it late?##")
    assert answers[0]["retained_tokens"] == num_tokens // 16 * 16
