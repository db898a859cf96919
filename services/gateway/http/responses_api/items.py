"""The items of a response's input: messages, calls, their results, and reasoning, as a client
writes them or as an earlier response had them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from services.gateway.api import ChatMessage
from services.gateway.http.bodies.fields import TypedBody
from services.gateway.http.bodies.messages import assistant_fields
from services.gateway.http.bodies.parts import ItemContent, Said
from services.gateway.http.bodies.tools import call_fields

REASONING_ID = "rs_"
"""How the ids of items with reasoning begin, here and in OpenAI's API."""

_NEEDED = {
    "message": ("role",),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id",),
    "reasoning": (),
    "item_reference": ("id",),
}
"""The fields that an item of each type has, beside those that every item may have."""


class Item(TypedBody):
    """An item of the input. Messages have `content`, and so has reasoning as the model has written
    it. `summary` and encrypted reasoning, which other servers write, are not read."""

    needed = _NEEDED
    noun = "item"
    default_type = "message"

    type: str | None = Field(None, json_schema_extra={"enum": [None, *_NEEDED]})
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: ItemContent = Said()
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: ItemContent = Said()
    id: str | None = None

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        # Reasoning may be left out of a conversation, unlike anything else.
        if self.kind == "item_reference" and not (self.id or "").startswith(REASONING_ID):
            raise ValueError(f"Quire keeps no items: send the item {self.id!r} itself")
        return self


def messages_of(items: Iterable[Item]) -> Iterator[ChatMessage]:
    """The messages of a conversation. Reasoning, a text and calls that follow one another are one
    message of the assistant."""
    reasoning, content, calls = "", "", list[Mapping[str, Any]]()

    def turn() -> Iterator[ChatMessage]:
        nonlocal reasoning, content
        if reasoning or content or calls:
            yield ChatMessage("assistant", content, fields=assistant_fields(calls, reasoning))
        reasoning = content = ""
        calls.clear()

    for item in items:
        said = item.content
        match item.kind:
            case "item_reference":
                continue
            case "function_call":
                calls.append(call_fields(item.call_id, item.name, item.arguments))
                continue
        is_own = item.kind == "reasoning" or item.role == "assistant"
        if content or calls or not is_own:
            yield from turn()
        if item.kind == "reasoning":
            reasoning += said.reasoning + said.text
        elif item.kind == "function_call_output":
            yield ChatMessage("tool", item.output.text, fields={"tool_call_id": item.call_id})
        elif item.role == "assistant":
            reasoning, content = reasoning + said.reasoning, said.text
        else:
            yield ChatMessage(item.role or "", said.text)
    yield from turn()
