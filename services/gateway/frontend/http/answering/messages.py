"""The messages of chat completions and the parts of their streams, in OpenAI's format."""

from collections.abc import Sequence

from services.gateway.frontend.http.answering.logprobs import JSON
from services.gateway.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning


def delta_fields(part: Part) -> JSON:
    """The field `delta` of a choice, for one part of its message."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call(call_id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_fields(parts: Sequence[Part]) -> JSON:
    """The field `message` of a choice. Its content is null if it has none but calls."""
    content, reasoning = "", ""
    calls: list[JSON] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, call_id, name):
                calls.append(_call(call_id, name, ""))
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _call(call_id: str, name: str, arguments: str) -> JSON:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
