"""Brings a conversation into the form that the model's chat template takes."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from services.gateway.api import ChatMessage
from services.gateway.workers.models.template_traits import TemplateTraits

Fields = dict[str, Any]
"""A message as a template gets it."""

_INSTRUCTIONS = ("system", "developer")


def fitted(messages: Sequence[ChatMessage], traits: TemplateTraits) -> list[Fields]:
    """The messages for a template with these traits; none of them is lost."""
    # Most templates do not know the role `developer`; some of them would leave the message out.
    developer = "developer" if traits.knows_developer else "system"
    fields = [_fields(message, developer) for message in messages]
    if not traits.takes_later_systems:
        fields = _with_one_system(fields)
    if not traits.takes_parallel_calls:
        fields = list(_with_single_calls(fields))
    return fields


def _fields(message: ChatMessage, developer: str) -> Fields:
    role = developer if message.role == "developer" else message.role
    fields = {"role": role, "content": message.content, **message.fields}
    return {**fields, "name": message.name} if message.name else fields


def _with_one_system(messages: list[Fields]) -> list[Fields]:
    """All instructions as one message at the beginning."""
    instructions = [message for message in messages if message["role"] in _INSTRUCTIONS]
    if not instructions:
        return messages
    content = "\n\n".join(text for each in instructions if (text := each["content"]))
    others = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    return [{**instructions[0], "content": content}, *others]


def _with_single_calls(messages: list[Fields]) -> Iterator[Fields]:
    """The messages with at most one call each."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if len(message.get("tool_calls", ())) < 2:
            yield message
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", messages[position:]))
        position += len(results)
        yield from _one_by_one(message, results)


def _one_by_one(message: Fields, results: list[Fields]) -> Iterator[Fields]:
    """Each call of `message` in a message of its own, followed by its result."""
    for call in message["tool_calls"]:
        yield {**message, "tool_calls": [call]}
        message = {"role": message["role"], "content": ""}  # the first one says the rest
        own = (each for each in results if (each.get("tool_call_id") or "") == call["id"])
        if result := next(own, None):
            results.remove(result)
            yield result
    yield from results
