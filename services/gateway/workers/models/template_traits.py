"""The parts of a conversation that a chat template takes, found by rendering small conversations
with it.

Some templates refuse a second system message, or a second call in one message, and some leave it
out without a word. A conversation can be brought into a form that such a template takes whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from services.model.text.chat_template import ChatTemplate
from services.runtime.errors import InvalidRequest

_Messages = Sequence[Mapping[str, Any]]

_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object"}},
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    knows_developer: bool
    """The template has a case for the role `developer`."""
    takes_later_systems: bool
    """A system message may stand anywhere, and there may be several."""
    takes_parallel_calls: bool
    """A message of the assistant may have several calls."""

    @classmethod
    def of(cls, template: ChatTemplate) -> Self:
        user, answer = _said("user", "u1"), _said("assistant", "a1")
        question = [user, answer, _said("user", "u2")]
        first = [_said("system", "s1"), *question]
        several = [_said("system", "s1"), _said("system", "s2"), user, answer]
        several += [_said("system", "s3"), _said("user", "u2")]
        return cls(
            knows_developer=template.has_string("developer"),
            takes_later_systems=not _keeps(template, first) or _keeps(template, several),
            takes_parallel_calls=not _keeps(template, _called("c1"))
            or _keeps(template, _called("c1", "c2")),
        )


def _mark(name: str) -> str:
    return f"probe{name}"


def _said(role: str, name: str) -> dict[str, Any]:
    return {"role": role, "content": _mark(name)}


def _called(*names: str) -> list[dict[str, Any]]:
    """A conversation with a message that has calls."""
    calls = [
        {
            "id": f"probecal{number}",  # Mistral's templates demand 9 characters
            "type": "function",
            "function": {"name": "look", "arguments": {"at": _mark(name)}},
        }
        for number, name in enumerate(names)
    ]
    results = [
        {**_said("tool", f"r{name}"), "name": "look", "tool_call_id": call["id"]}
        for name, call in zip(names, calls, strict=True)
    ]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    return [_said("user", "u1"), asked, *results]


def _keeps(template: ChatTemplate, messages: _Messages) -> bool:
    """Whether the template renders these messages, and leaves out none of their texts."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    try:
        text = template.render(messages, tools=[_TOOL] if calls else ())
    except InvalidRequest:
        return False
    texts = [message["content"] for message in messages]
    texts += [call["function"]["arguments"]["at"] for call in calls]
    return all(each in text for each in texts)
