"""The messages of a conversation in Anthropic's form: each has blocks of text, reasoning, calls and
their results."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from services.gateway.api import ChatMessage
from services.gateway.chat.prompts import MAX_MESSAGES
from services.gateway.http.bodies.fields import Body, FieldError, TypedBody
from services.gateway.http.bodies.messages import assistant_fields
from services.gateway.http.bodies.parts import MessageContent, Said
from services.gateway.http.bodies.retention import CacheControl
from services.gateway.http.bodies.tools import call_fields

_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
"""The role of the messages that may have blocks of a type; other blocks may stand anywhere."""
_BILLING = "x-anthropic-billing-header:"
"""How a block of the system prompt begins that Claude Code means for Anthropic's servers. The block
differs from request to request, so the prefix cache would have no prompt that begins with it."""


class CachedBody(Body):
    """A part of the prompt, up to which the client may want the prefix cache to keep the prompt."""

    cache_control: CacheControl = None


class Block(TypedBody, CachedBody):
    needed = _NEEDED
    noun = "block"

    type: str = Field(json_schema_extra={"enum": [*_NEEDED]})
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: MessageContent = Said()
    is_error: bool | None = None


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Blocks = Annotated[list[Block], Field(fail_fast=True)]
Blocks = Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]


class BlockMessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for block in self.content:
            if (role := _ROLES.get(block.type, self.role)) != self.role:
                text = f"blocks of type {block.type} are for messages with role {role}"
                raise FieldError("content", text)
        return self

    def to_messages(self) -> Iterator[ChatMessage]:
        """Each result of a call becomes a message of its own, before the text."""
        if self.role == "assistant":
            called = self._of("tool_use")
            calls = [call_fields(each.id, each.name, each.input) for each in called]
            reasoning = "".join(block.thinking or "" for block in self._of("thinking"))
            text = "".join(block.text or "" for block in self._of("text"))
            yield ChatMessage("assistant", text, fields=assistant_fields(calls, reasoning))
            return
        results = self._of("tool_result")
        for block in results:
            text = f"Error: {block.content.text}" if block.is_error else block.content.text
            yield ChatMessage("tool", text, fields={"tool_call_id": block.tool_use_id})
        if (texts := self._of("text")) or not results:
            yield ChatMessage(self.role, "\n".join(block.text or "" for block in texts))

    def _of(self, kind: str) -> list[Block]:
        return [block for block in self.content if block.type == kind]


Messages = Annotated[
    list[BlockMessageBody], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


def messages_of(
    system: Sequence[Block], messages: Sequence[BlockMessageBody]
) -> tuple[ChatMessage, ...]:
    """The conversation for the chat template, with the system prompt as its first message."""
    texts = [block.text or "" for block in system]
    texts = [text for text in texts if not text.startswith(_BILLING)]
    first = [ChatMessage("system", "\n".join(texts))] if texts else []
    return (*first, *(each for message in messages for each in message.to_messages()))
