"""The messages of a chat's body."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from services.gateway.api import ChatMessage
from services.gateway.chat.prompts import MAX_MESSAGES
from services.gateway.http.bodies.fields import Body, FieldError
from services.gateway.http.bodies.parts import MessageContent, Said
from services.gateway.http.bodies.retention import Breakpoint, CacheControl
from services.gateway.http.bodies.tools import ToolCalls, call_fields
from services.gateway.http.bodies.unknown_fields import OF_MESSAGES


class MessageBody(Body):
    refused = OF_MESSAGES

    role: str = Field(min_length=1)
    content: MessageContent = Said()
    name: str | None = None
    tool_calls: ToolCalls | None = None
    """The calls of an assistant's message."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    refusal: str | None = None
    """The text with which an assistant refuses, in place of the content."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    """The reasoning of an assistant's message, for templates that show it. `reasoning` is vLLM's
    newer name for `reasoning_content`, and `thinking` is Ollama's."""
    cache_control: CacheControl = None
    """A breakpoint after the message."""

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "tool_calls are of messages with role assistant")
        return self

    @property
    def breakpoints(self) -> tuple[Breakpoint, ...]:
        own = () if self.cache_control is None else ((None, self.cache_control),)
        return *self.content.breakpoints, *own

    def to_message(self) -> ChatMessage:
        said = self.content
        reasoning = self.reasoning_content or self.reasoning or self.thinking or said.reasoning
        called = ((each.id, each.function) for each in self.tool_calls or ())
        calls = [call_fields(call_id, each.name, each.arguments) for call_id, each in called]
        fields = assistant_fields(calls, reasoning)
        if self.tool_call_id is not None and self.role == "tool":
            fields["tool_call_id"] = self.tool_call_id
        return ChatMessage(self.role, said.text or self.refusal or "", self.name or "", fields)


def assistant_fields(calls: Sequence[Mapping[str, Any]], reasoning: str) -> dict[str, Any]:
    """The fields of an assistant's message for the chat template, beside its content."""
    fields: dict[str, Any] = {}
    if calls:
        fields["tool_calls"] = list(calls)
    if reasoning:
        # Qwen's and DeepSeek's templates read the first name, gpt-oss's the second.
        fields["reasoning_content"] = fields["thinking"] = reasoning
    return fields


Messages = Annotated[list[MessageBody], Field(fail_fast=True, max_length=MAX_MESSAGES)]
