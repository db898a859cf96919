"""The body of /v1/responses.

A field that asks for something that Quire does not have (stored responses, tools, other formats
than text) is refused with the reason, unless its value requests nothing.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from services.common.structured.structure import Structure
from services.gateway.frontend.api import ChatMessage, GenerationRequest, RequestedSampling
from services.gateway.frontend.http.fields import Body
from services.gateway.frontend.http.schema import (
    ReasoningEffort,
    SampledBody,
    one_structure,
    template_arguments,
)
from services.gateway.frontend.http.structured import ResponsesFormat
from services.gateway.intake.prompts import MAX_MESSAGES, PROMPT

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs."""

Included = Literal["message.output_text.logprobs"]

_STATELESS = "Quire keeps no responses: send the whole conversation as `input`"
_NO_TOOLS = "tools are not supported"

_PART_TYPES = ("input_text", "output_text", "text")


def _only(reason: str, *values: Any) -> tuple[Any, Any]:
    """The annotations of a field that may have one of `values`, which request nothing, or null;
    `reason` refuses any other value."""

    def check(value: Any) -> Any:
        if value is None or any(value == v and type(value) is type(v) for v in values):
            return value
        raise ValueError(reason)

    return PlainValidator(check), WithJsonSchema({"enum": [None, *values]})


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
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind not in _PART_TYPES:
            raise ValueError(f"content parts of type {kind!r} are not supported, only input_text")
    raise ValueError('a text part is {"type": "input_text", "text": "..."}')


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_PART_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


def _is_message(kind: str | None) -> str | None:
    if kind not in (None, "message"):
        raise ValueError(f"items of type {kind!r} are not supported, only 'message'; {_NO_TOOLS}")
    return kind


class ItemBody(Body):
    """A message, as a client writes it or as an earlier response had it."""

    type: Annotated[str | None, AfterValidator(_is_message)] = Field(
        None, json_schema_extra={"enum": [None, "message"]}
    )
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str,
        PlainValidator(_content),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
    ]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def to_message(self) -> ChatMessage:
        # Chat templates know no developer, whose place the system message takes.
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, self.content)


class TextBody(Body):
    format: ResponsesFormat | None = None
    verbosity: Annotated[Any, *_only("verbosity is not supported")] = None


class ReasoningBody(Body):
    effort: ReasoningEffort | None = None
    summary: Annotated[Any, *_only("summaries of reasoning are not supported")] = None
    generate_summary: Annotated[Any, *_only("summaries of reasoning are not supported")] = None


class ResponsesStreamOptions(Body):
    """Has only ignored fields: the events of a response always end with its usage."""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[ItemBody], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(SampledBody):
    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    store: Annotated[Any, *_only(_STATELESS, False)] = None
    previous_response_id: Annotated[Any, *_only(_STATELESS)] = None
    conversation: Annotated[Any, *_only(_STATELESS)] = None
    background: Annotated[
        Any, *_only(f"no response runs in the background. {_STATELESS}", False)
    ] = None
    prompt: Annotated[Any, *_only(f"stored prompts do not exist. {_STATELESS}")] = None
    tools: Annotated[Any, *_only(_NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, *_only(_NO_TOOLS, "none", "auto")] = None
    max_tool_calls: Annotated[Any, *_only(_NO_TOOLS)] = None
    truncation: Annotated[
        Any, *_only("an input that is too long is refused, not truncated", "disabled")
    ] = None

    @property
    def names(self) -> dict[str, str]:
        return {PROMPT: "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}

    @property
    def structure(self) -> Structure | None:
        given = None if self.text is None else self.text.format
        return one_structure("text.format", given, super().structure)

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        _ = self.structure
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def sampling(self) -> RequestedSampling:
        return replace(super().sampling(), max_tokens=self.max_output_tokens)

    def requests(self, request_id: str) -> list[GenerationRequest]:
        messages = [item.to_message() for item in self.input]
        if self.instructions is not None:
            messages.insert(0, ChatMessage("system", self.instructions))
        effort = self.reasoning.effort if self.reasoning else None
        arguments = template_arguments(self.chat_template_kwargs, effort)
        request = self.request(tuple(messages), request_id)
        return [replace(request, template_arguments=arguments)]
