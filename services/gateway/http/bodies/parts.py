"""The content of a message or an item: text, a list of texts and parts, or null."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.http.bodies.retention import Breakpoint, parse_cache_control

_TEXT_TYPES = ("text", "input_text", "output_text")
_REASONING_TYPES = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Said:
    """The text of a message. `reasoning` is the text of the parts that are reasoning."""

    text: str = ""
    reasoning: str = ""
    breakpoints: tuple[Breakpoint, ...] = ()
    """Where parts with `cache_control` end."""


def _said(value: Any, joint: str) -> Said:
    """`joint` stands between the texts of two parts."""
    match value:
        case None:
            return Said()
        case str(text):
            return Said(text)
        case [*parts]:
            said = list(map(_part, parts))
            texts = [text for text, is_reasoning in said if not is_reasoning]
            thoughts = [text for text, is_reasoning in said if is_reasoning]
            whole = Said(joint.join(texts), joint.join(thoughts))
            return replace(whole, breakpoints=_breakpoints(parts, said, joint))
    raise ValueError("must be text or a list of text parts")


def _breakpoints(
    parts: list[Any], said: list[tuple[str, bool]], joint: str
) -> tuple[Breakpoint, ...]:
    found, num_chars = list[Breakpoint](), 0
    for part, (text, is_reasoning) in zip(parts, said, strict=True):
        if not is_reasoning:
            num_chars += len(text) + (len(joint) if num_chars else 0)
        ttl_s = parse_cache_control(part.get("cache_control")) if isinstance(part, dict) else None
        if ttl_s is not None:
            found.append((num_chars, ttl_s))
    return tuple(found)


def _part(part: Any) -> tuple[str, bool]:
    """The text of a part, and whether it is reasoning."""
    match part:
        case str(text):
            return text, False
        case {"type": kind, "text": str(text)} if kind in _TEXT_TYPES:
            return text, False
        case {"type": "refusal", "refusal": str(text)}:
            return text, False
        case {"type": "thinking", "thinking": [*parts]}:
            return _said(parts, "").text, True
        case {"type": kind} if kind in _REASONING_TYPES:
            text = part.get("thinking", part.get("text"))
            return text if isinstance(text, str) else "", True
        case {"type": str(kind)} if kind not in (*_TEXT_TYPES, "refusal"):
            shown = kind[:_MAX_SHOWN]
            raise ValueError(f"content parts of type {shown!r} are not supported, only text")
    raise ValueError('a text part is {"type": "text", "text": "..."}')


_PART = {
    "type": "object",
    "properties": {"type": {"enum": [*_TEXT_TYPES, "refusal", *_REASONING_TYPES]}},
    "required": ["type"],
}
_PARTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART]}}
_SCHEMA = WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]})

MessageContent = Annotated[Said, PlainValidator(partial(_said, joint="\n")), _SCHEMA]
"""The content of a chat's message. Its parts are joined as lines, as in vLLM."""
ItemContent = Annotated[Said, PlainValidator(partial(_said, joint="")), _SCHEMA]
"""The content of a response's item. Its parts are one text, as in the model's output."""
