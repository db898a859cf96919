"""The messages of a chat's body."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from services.gateway.frontend.api import ChatMessage
from services.gateway.frontend.http.bodies.fields import Body, FieldError, MessageText
from services.gateway.frontend.http.bodies.tools import ToolCallBody, ToolCalls
from services.gateway.intake.prompts import MAX_MESSAGES


class MessageBody(Body):
    role: str = Field(min_length=1)
    content: MessageText = ""
    name: str | None = None
    tool_calls: ToolCalls | None = None
    """Of an assistant's message: its calls."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Of an assistant's message, for templates that show earlier reasoning; `reasoning` is vLLM's
    newer name for it."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "tool_calls are of messages with role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise FieldError("tool_call_id", "tool_call_id is of messages with role tool")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise FieldError("content", "content is needed, except with tool_calls")
        return self

    def to_message(self) -> ChatMessage:
        reasoning = self.reasoning_content or self.reasoning or ""
        fields = assistant_fields(self.tool_calls or (), reasoning)
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return ChatMessage(self.role, self.content, self.name or "", fields)


def assistant_fields(calls: Sequence[ToolCallBody], reasoning: str) -> dict[str, Any]:
    """The fields of an assistant's message for the chat template, beside its content."""
    fields: dict[str, Any] = {}
    if calls:
        fields["tool_calls"] = [call.to_fields() for call in calls]
    if reasoning:
        # Qwen's and DeepSeek's templates read the first name, gpt-oss's the second.
        fields["reasoning_content"] = fields["thinking"] = reasoning
    return fields


Messages = Annotated[list[MessageBody], Field(fail_fast=True, max_length=MAX_MESSAGES)]
