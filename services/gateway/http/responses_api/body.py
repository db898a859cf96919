"""The body of /v1/responses.

A field that asks the server for a conversation that it has kept is refused with the reason.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from services.gateway.api import ChatMessage, GenerationRequest, RequestedTools
from services.gateway.chat.prompts import MAX_MESSAGES, PROMPT
from services.gateway.http.bodies.fields import Body, Strings
from services.gateway.http.bodies.schema import ReasoningEffort, SampledBody, template_arguments
from services.gateway.http.bodies.structured import ResponsesFormat, one_structure
from services.gateway.http.bodies.tools import (
    MAX_TOOLS,
    Choice,
    FunctionBody,
    NamedFunctionBody,
    OtherTool,
    requested_tools,
    tagged,
)
from services.gateway.http.responses_api.items import Item, messages_of
from services.gateway.workers.models.structures import STRUCTURE
from services.model.structured.structure import Structure

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs."""

_STATELESS = "Quire keeps no responses: send the whole conversation as `input`"


def _only(reason: str, *values: Any) -> tuple[Any, Any]:
    """Return the annotations of a field that may be null or one of `values`, which request nothing;
    any other value is refused with `reason`."""

    def check(value: Any) -> Any:
        if value is None or any(value == v and type(value) is type(v) for v in values):
            return value
        raise ValueError(reason)

    return PlainValidator(check), WithJsonSchema({"enum": [None, *values]})


class FunctionToolBody(FunctionBody):
    """A function, with its fields in the tool itself."""

    type: Literal["function"]


Tool = Annotated[
    Annotated[FunctionToolBody, Tag("function_tool")] | OtherTool, Discriminator(tagged)
]


class FunctionChoiceBody(NamedFunctionBody):
    type: Literal["function"]


NamedTool = Annotated[
    Annotated[FunctionChoiceBody, Tag("function_tool")] | OtherTool, Discriminator(tagged)
]


class AllowedChoiceBody(Body):
    """OpenAI's choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


ObjectChoice = Annotated[FunctionChoiceBody | AllowedChoiceBody, Discriminator("type")]


class TextBody(Body):
    format: ResponsesFormat | None = None


class ReasoningBody(Body):
    effort: ReasoningEffort | None = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(SampledBody):
    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Strings | None = None
    top_logprobs: int | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    previous_response_id: Annotated[Any, *_only(_STATELESS)] = None
    conversation: Annotated[Any, *_only(_STATELESS)] = None
    background: Annotated[
        Any, *_only(f"no response runs in the background. {_STATELESS}", False)
    ] = None
    prompt: Annotated[Any, *_only(f"stored prompts do not exist. {_STATELESS}")] = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | ObjectChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        own = {PROMPT: "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        has_format = self.text is not None and self.text.format is not None
        return own | {STRUCTURE: "text.format"} if has_format else own

    def requested_structure(self) -> Structure | None:
        given = None if self.text is None else self.text.format
        return one_structure("text.format", given, super().requested_structure())

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.requested_structure()
        self.requested_tools()
        return self

    @property
    def format_json(self) -> Any:
        """The field `text.format` of the response."""
        given = None if self.text is None else self.text.format
        return {"type": "text"} if given is None else given.model_dump(by_alias=True)

    @property
    def chosen_json(self) -> Any:
        """The field `tool_choice` of the response."""
        chosen = self.tool_choice
        return chosen.model_dump() if isinstance(chosen, Body) else chosen or "auto"

    @property
    def functions(self) -> list[FunctionToolBody]:
        """The tools that are served."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionToolBody)]

    def requested_tools(self) -> RequestedTools | None:
        chosen, allowed = self.tool_choice, None
        if isinstance(chosen, AllowedChoiceBody):
            named = [tool for tool in chosen.tools if isinstance(tool, FunctionChoiceBody)]
            chosen, allowed = chosen.mode, [tool.name for tool in named]
        return requested_tools(self.functions, chosen, self.parallel_tool_calls, allowed)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def sampling(self) -> dict[str, Any]:
        return {**super().sampling(), "max_tokens": self.max_output_tokens}

    def options(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning else None
        return {
            "template_arguments": template_arguments(self.chat_template_kwargs, effort),
            "tools": self.requested_tools(),
            "wants_parts": True,
        }

    def requests(self, request_id: str, timeout_s: float | None = None) -> list[GenerationRequest]:
        messages = list(messages_of(self.input))
        if self.instructions is not None:
            messages.insert(0, ChatMessage("system", self.instructions))
        return [self.request(tuple(messages), request_id, timeout_s)]
