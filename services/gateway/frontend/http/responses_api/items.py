"""The items of a response's input: messages, calls, their results, and reasoning, as a client
writes them or as an earlier response had them."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from services.gateway.frontend.api import ChatMessage
from services.gateway.frontend.http.bodies.fields import Body
from services.gateway.frontend.http.bodies.messages import assistant_fields
from services.gateway.frontend.http.bodies.tools import CalledFunctionBody, Name, ToolCallBody

_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text")


def _content(value: Any) -> str:
    """The text of an item. The parts of an item are one text, as in the model's output."""
    match value:
        case str(text):
            return text
        case [*parts]:
            return "".join(map(_part, parts))
    raise ValueError("must be text or a list of text parts")


def _part(part: Any) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _PART_TYPES:
            return text
        case {"type": str(kind)} if kind not in _PART_TYPES:
            raise ValueError(f"content parts of type {kind!r} are not supported, only input_text")
    raise ValueError('a text part is {"type": "input_text", "text": "..."}')


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_PART_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_Text = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
]


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The fields that an item of each type has, beside those that every item may have."""


def _is_known(kind: str | None) -> str | None:
    if kind is not None and kind not in _NEEDED:
        known = ", ".join(_NEEDED)
        raise ValueError(f"items of type {kind!r} are not supported, only {known}")
    return kind


class Item(Body):
    """`content`: of messages, and of reasoning as the model has written it. A `summary` of
    reasoning, which other servers write, is not read."""

    type: Annotated[str | None, AfterValidator(_is_known)] = Field(
        None, json_schema_extra={"enum": [None, *_NEEDED]}
    )
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Text = ""
    call_id: str | None = None
    name: Name | None = None
    arguments: str | None = None
    output: _Text = ""
    summary: list[Any] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def kind(self) -> str:
        return self.type or "message"

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        missing = [
            name
            for name in _NEEDED[self.kind]
            if name not in self.model_fields_set or getattr(self, name) is None
        ]
        if missing:
            raise ValueError(f"an item of type {self.kind} needs {', '.join(missing)}")
        return self


def messages_of(items: Iterable[Item]) -> Iterator[ChatMessage]:
    """The messages of a conversation. Reasoning, a text and calls that follow one another are one
    message of the assistant."""
    reasoning, content, calls = list[str](), "", list[ToolCallBody]()

    def turn() -> Iterator[ChatMessage]:
        nonlocal content
        if reasoning or content or calls:
            fields = assistant_fields(calls, "".join(reasoning))
            yield ChatMessage("assistant", content, fields=fields)
        content = ""
        reasoning.clear()
        calls.clear()

    for item in items:
        if item.kind == "function_call":
            function = CalledFunctionBody(name=item.name or "", arguments=item.arguments or "")
            calls.append(ToolCallBody(id=item.call_id or "", function=function))
            continue
        is_own = item.kind == "reasoning" or item.role == "assistant"
        if content or calls or not is_own:
            yield from turn()
        if item.kind == "reasoning":
            reasoning.append(item.content)
        elif item.kind == "function_call_output":
            yield ChatMessage("tool", item.output, fields={"tool_call_id": item.call_id})
        elif item.role == "assistant":
            content = item.content
        else:
            yield ChatMessage(item.role or "", item.content)
    yield from turn()
