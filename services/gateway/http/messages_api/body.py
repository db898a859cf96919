"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from services.gateway.api import (
    ChatMessage,
    GenerationRequest,
    Prompt,
    RequestedTools,
    RetainDirective,
)
from services.gateway.chat.prompts import PROMPT
from services.gateway.http.bodies.fields import Body, FieldError, Strings, TypedBody
from services.gateway.http.bodies.schema import ReasoningEffort, SampledBody, template_arguments
from services.gateway.http.bodies.structured import OutputFormatBody, one_structure
from services.gateway.http.bodies.tools import (
    MAX_TOOLS,
    Choice,
    FunctionBody,
    Name,
    NamedFunctionBody,
    OtherToolBody,
    requested_tools,
    tagged,
)
from services.gateway.http.bodies.unknown_fields import OF_PROMPTS, OF_REQUESTS
from services.gateway.http.messages_api.blocks import Blocks, CachedBody, Messages, messages_of
from services.gateway.workers.models.structures import STRUCTURE
from services.model.structured.structure import Structure


class CustomToolBody(FunctionBody, CachedBody):
    """A tool of the client, which is a function for the model."""

    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")


class ServerToolBody(OtherToolBody, CachedBody):
    """A tool of Anthropic's servers. It is left out; its breakpoint counts."""


def _tagged(value: Any) -> str:
    return tagged(value, own=("custom", "function"))


Tool = Annotated[
    Annotated[CustomToolBody, Tag("function_tool")] | Annotated[ServerToolBody, Tag("other_tool")],
    Discriminator(_tagged),
]


_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "none": "none"}


class ToolChoiceBody(TypedBody):
    needed = dict.fromkeys(_CHOICES, ()) | {"tool": ("name",)}
    noun = "tool_choice"

    type: str = Field(json_schema_extra={"enum": [*_CHOICES, "tool"]})
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    """`adaptive` and `between_tools` leave it to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputConfigBody(Body):
    effort: ReasoningEffort | None = None
    format: OutputFormatBody | None = None


class PromptBody(CachedBody):
    """The fields that make the prompt."""

    model: str | None = None
    messages: Messages
    system: Blocks = Field(default=[])
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        for block in self.system:
            if block.type != "text":
                raise FieldError("system", f"system has a block of type {block.type}, not text")
        self.requested_tools()
        return self

    @property
    def names(self) -> dict[str, str]:
        own = {PROMPT: "messages", "stop": "stop_sequences"}
        has_format = self.output_config is not None and self.output_config.format is not None
        return own | {STRUCTURE: "output_config.format"} if has_format else own

    def requested_tools(self) -> RequestedTools | None:
        functions = [each for each in self.tools or () if isinstance(each, CustomToolBody)]
        given = self.tool_choice
        if given is None:
            return requested_tools(functions, None, None)
        choice = _CHOICES.get(given.type) or NamedFunctionBody(name=given.name or "")
        return requested_tools(functions, choice, not given.disable_parallel_tool_use)

    def prompt(self) -> tuple[ChatMessage, ...]:
        return messages_of(self.system, self.messages)

    def template_arguments(self) -> dict[str, Any]:
        effort = self.output_config.effort if self.output_config else None
        given = template_arguments(self.chat_template_kwargs, effort)
        if self.thinking is None or self.thinking.type not in ("enabled", "disabled"):
            return given
        # Qwen's and SmolLM's templates read the first name, DeepSeek's and Granite's the second.
        names, thinks = ("enable_thinking", "thinking"), self.thinking.type == "enabled"
        return {**dict.fromkeys(names, thinks), **given}


class CountTokensBody(PromptBody):
    refused = OF_PROMPTS

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            self.prompt(),
            model=self.model or "",
            template_arguments=self.template_arguments(),
            tools=self.requested_tools(),
        )


class MessagesBody(PromptBody, SampledBody):
    refused = OF_REQUESTS | {"output_format": ()}

    max_tokens: Annotated[int, Field(ge=1)]
    """If the context leaves fewer tokens, the message ends with the context."""
    stop_sequences: Strings | None = None

    @model_validator(mode="after")
    def _check_message(self) -> Self:
        if self.messages[-1].role == "assistant":
            text = "the last message is the assistant's, and Quire does not continue a message"
            raise FieldError("messages", f"messages: {text}; end with a message of the user")
        self.requested_structure()
        return self

    def requested_structure(self) -> Structure | None:
        given = None if self.output_config is None else self.output_config.format
        return one_structure("output_config.format", given, super().requested_structure())

    def directives(self, prompt: Prompt, name: str) -> tuple[RetainDirective, ...]:
        whole = self.cache_control
        own = () if whole is None else (RetainDirective(whole),)
        return *super().directives(prompt, name), *self._breakpoints(), *own

    def _breakpoints(self) -> Iterator[RetainDirective]:
        """The directives of tools and blocks: the chat up to and with each of them. The tools stand
        in the system prompt, before or after its text, as the chat template wants."""
        for tool in self.tools or ():
            if tool.cache_control is not None:
                until = messages_of(self.system, ())
                yield RetainDirective(tool.cache_control, until=until)
        for number, block in enumerate(self.system, 1):
            if block.cache_control is not None:
                until = messages_of(self.system[:number], ())
                yield RetainDirective(block.cache_control, until=until)
        for place, message in enumerate(self.messages):
            for number, block in enumerate(message.content, 1):
                if block.cache_control is not None:
                    last = message.model_copy(update={"content": message.content[:number]})
                    until = messages_of(self.system, (*self.messages[:place], last))
                    yield RetainDirective(block.cache_control, until=until)

    def sampling(self) -> dict[str, Any]:
        return {
            **super().sampling(),
            "default_max_tokens": self.max_tokens,
            "stop": (*self.stop, *(self.stop_sequences or ())),
        }

    def options(self) -> dict[str, Any]:
        return {
            "template_arguments": self.template_arguments(),
            "tools": self.requested_tools(),
            "wants_parts": True,
            # The first event of a stream has the number of the prompt's tokens.
            "running_usage": bool(self.stream),
        }

    def requests(self, request_id: str, timeout_s: float | None = None) -> list[GenerationRequest]:
        return [self.request(self.prompt(), request_id, timeout_s)]
