"""The bodies of requests for text: OpenAI's fields and vLLM's extras.

This module checks types and combinations of fields. The gateway's admission checks the values, for
gRPC and HTTP alike.
"""

from dataclasses import fields
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from quire.types import Beam
from services.gateway.api import (
    GenerationRequest,
    Prompt,
    RequestedSampling,
    RequestedTools,
    RetainDirective,
)
from services.gateway.chat.prompts import PROMPT
from services.gateway.http.bodies.fields import (
    Biases,
    Body,
    FieldError,
    Integers,
    NumberOrFalse,
    Prompts,
    StreamOptions,
    Strings,
    Texts,
    TruncatedBody,
)
from services.gateway.http.bodies.messages import Messages
from services.gateway.http.bodies.retention import DAY_S, breakpoints
from services.gateway.http.bodies.structured import (
    ResponseFormat,
    StructuredOutputsBody,
    one_structure,
)
from services.gateway.http.bodies.tools import (
    AllowedChoiceBody,
    ChatChoice,
    NamedChoiceBody,
    Tools,
    functions_of,
    requested_tools,
)
from services.gateway.http.bodies.unknown_fields import OF_REQUESTS
from services.gateway.workers.models.structures import STRUCTURE
from services.model.structured.structure import Structure

DEFAULT_MAX_TOKENS = 16
"""The default of max_tokens for a text completion, as in OpenAI's API."""


class SampledBody(Body):
    """The fields of every request for text."""

    refused = OF_REQUESTS

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Texts = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases = Field(default_factory=dict)
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    stream: bool | None = None

    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    include_metrics: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    request_id: str | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Integers | None = None
    structured_outputs: StructuredOutputsBody | None = None
    top_k: int | None = None

    def requested_structure(self) -> Structure | None:
        """The form that the body asks for in `structured_outputs`, or in its API's own field."""
        return None if self.structured_outputs is None else self.structured_outputs.to_structure()

    @property
    def names(self) -> dict[str, str]:
        """This body's names of the parameters that have others in `GenerationRequest`."""
        return {}

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens whose logprobs to report, in addition to each token's own;
        None to report no logprobs."""
        return None

    def request(
        self, prompt: Prompt, request_id: str, timeout_s: float | None, *, is_further: bool = False
    ) -> GenerationRequest:
        return GenerationRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model or "",
            sampling=RequestedSampling(**self.sampling()),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            timeout_s=timeout_s,
            include_metrics=bool(self.include_metrics),
            is_further=is_further,
            retain=self.directives(prompt, "" if is_further else self.prompt_cache_key or ""),
            **self.options(),
        )

    def requests(self, request_id: str, timeout_s: float | None = None) -> list[GenerationRequest]:
        """One request for each prompt, in order."""
        raise NotImplementedError

    def directives(self, prompt: Prompt, name: str) -> tuple[RetainDirective, ...]:
        """Return the prefixes of the prompt that the body asks to retain."""
        lasts = self.prompt_cache_retention == "24h"
        return (RetainDirective(DAY_S, name),) if lasts else ()

    def sampling(self) -> dict[str, Any]:
        """The fields of `RequestedSampling`: given fields of the same name, and fields that need a
        conversion."""
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name in _SAMPLING
            if (value := getattr(self, name)) is not None
        }
        return {**given, "logprobs": self.num_logprobs, "structure": self.requested_structure()}

    def options(self) -> dict[str, Any]:
        """The other fields of `GenerationRequest` that this kind of body has."""
        return {}


_SAMPLING = SampledBody.model_fields.keys() & {one.name for one in fields(RequestedSampling)}
_SAMPLING -= {"structured_outputs"}
"""The sampling parameters of every body."""


class GenerationBody(SampledBody, TruncatedBody):
    """The fields that the bodies of both completion endpoints have."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None

    beam_width: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    length_penalty: float | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for name in ("beam_width", "early_stopping", "length_penalty"):
            is_neutral = getattr(self, name) in (None, *OF_REQUESTS[name])
            if not (self.use_beam_search or is_neutral):
                raise FieldError(name, f"{name} is for requests with use_beam_search=true")
        self.requested_structure()
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is for requests with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            text = "prompt_logprobs are not available with stream=true"
            raise FieldError("prompt_logprobs", text)
        return self

    @property
    def names(self) -> dict[str, str]:
        return {} if self.response_format is None else {STRUCTURE: "response_format"}

    def requested_structure(self) -> Structure | None:
        return one_structure("response_format", self.response_format, super().requested_structure())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether each part of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """The number of choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def echoes(self) -> bool:
        """Whether the text begins with the prompt's text."""
        return False

    @property
    def only_prompt(self) -> bool:
        """Whether the answer has nothing of the generated tokens."""
        return False

    @property
    def without_reasoning(self) -> bool:
        """Whether the answer leaves out the model's reasoning."""
        return False

    def options(self) -> dict[str, Any]:
        return {
            "echo": self.echoes,
            "running_usage": self.running_usage,
            "truncation": self.truncation,
        }

    def sampling(self) -> dict[str, Any]:
        return {
            **super().sampling(),
            "max_tokens": self.max_tokens,
            "n": self.num_choices,
            "prompt_logprobs": self.prompt_logprobs,
            "beam": self._beams(),
        }

    def _beams(self) -> Beam | None:
        if not self.use_beam_search:
            return None
        width = self.num_choices if self.beam_width is None else self.beam_width
        return Beam(width, self.length_penalty, self.early_stopping or False)


class CompletionBody(GenerationBody):
    prompt: Prompts
    logprobs: NumberOrFalse = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_prompt(self) -> bool:
        """With an echo, max_tokens may be 0: the client wants the prompt's logprobs only."""
        return self.echoes and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        # Echoed tokens have logprobs like generated ones, in addition to `prompt_logprobs`.
        numbers = self.prompt_logprobs, self.logprobs if self.echoes else None
        return {
            **super().sampling(),
            # To compute a prompt, at least one token must be generated.
            "max_tokens": 1 if self.only_prompt else self.max_tokens,
            "default_max_tokens": DEFAULT_MAX_TOKENS,
            "prompt_logprobs": max((n for n in numbers if n is not None), default=None),
        }

    def options(self) -> dict[str, Any]:
        special = self.add_special_tokens is not False
        return {**super().options(), "add_special_tokens": special}

    def requests(self, request_id: str, timeout_s: float | None = None) -> list[GenerationRequest]:
        if len(self.prompt) == 1:
            return [self.request(self.prompt[0], request_id, timeout_s)]
        return [
            self.request(prompt, f"{request_id}-{index}", timeout_s, is_further=index > 0)
            for index, prompt in enumerate(self.prompt)
        ]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    tools: Tools | None = None
    tool_choice: ChatChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        self.requested_tools()
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is for requests with logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            text = "max_tokens and max_completion_tokens differ; give one of them"
            raise FieldError("max_completion_tokens", text)
        return self

    @property
    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        own = {PROMPT: "messages", "logprobs": "top_logprobs", "max_tokens": limit}
        return super().names | own

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def without_reasoning(self) -> bool:
        return self.include_reasoning is False

    def sampling(self) -> dict[str, Any]:
        sampling, limit = super().sampling(), self.max_completion_tokens
        return sampling if limit is None else {**sampling, "max_tokens": limit}

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "add_generation_prompt": self.add_generation_prompt is not False,
            "template_arguments": template_arguments(
                self.chat_template_kwargs, self.reasoning_effort
            ),
            "tools": self.requested_tools(),
            "wants_parts": True,
        }

    def requests(self, request_id: str, timeout_s: float | None = None) -> list[GenerationRequest]:
        messages = tuple(message.to_message() for message in self.messages)
        return [self.request(messages, request_id, timeout_s)]

    def directives(self, prompt: Prompt, name: str) -> tuple[RetainDirective, ...]:
        places = [message.breakpoints for message in self.messages]
        if not any(places):
            return super().directives(prompt, name)
        messages = tuple(message.to_message() for message in self.messages)
        return *super().directives(prompt, name), *breakpoints(messages, places)

    def requested_tools(self) -> RequestedTools | None:
        functions, parallel = functions_of(self.tools), self.parallel_tool_calls
        match self.tool_choice:
            case NamedChoiceBody(function=function):
                return requested_tools(functions, function, parallel)
            case AllowedChoiceBody(allowed_tools=allowed):
                chosen = [tool for tool in allowed.tools if isinstance(tool, NamedChoiceBody)]
                names = [tool.function.name for tool in chosen]
                return requested_tools(functions, allowed.mode, parallel, names)
            case choice:
                return requested_tools(functions, choice, parallel)


def template_arguments(
    given: dict[str, Any] | None, effort: ReasoningEffort | None
) -> dict[str, Any]:
    """The chat template's variables; its own variable takes precedence over the field `effort`."""
    return {**({} if effort is None else {"reasoning_effort": effort}), **(given or {})}
