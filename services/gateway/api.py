"""The interface between the gateway and its servers: `Generator` and its types.

The gRPC and the HTTP server both call `Generator`; nothing here depends on either.
"""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from quire import types
from quire.reports import Model
from quire.types import RetainAnswer, Sampling, Usage
from services.gateway.access.caller import EVERYONE, Caller, current_caller
from services.gateway.output.delta import Delta, Received
from services.model.structured.structure import Structure


@dataclass(frozen=True, slots=True)
class ChatMessage(types.ChatMessage):
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields for the chat template: tool_calls, tool_call_id, reasoning_content."""


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]
"""Text, token ids, or a conversation for the model's chat template."""

TemplateArguments = Mapping[str, Any]
"""Variables that a client sets for the chat template, in addition to the messages."""


class Truncation(NamedTuple):
    """The part of an overlong prompt that is computed."""

    num_tokens: int
    """The most tokens of the prompt; -1: as many as the model takes."""
    side: Literal["left", "right"]
    """The side of the prompt that is left out, as tokenizers call it."""


class ToolChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The functions that the model may call, as the client sent them."""

    definitions: tuple[Mapping[str, Any], ...]
    """Each as in OpenAI's API: `{"type": "function", "function": {"name": ...}}`."""
    choice: ToolChoice = ToolChoice.AUTO
    function: str | None = None
    """The function that the model must call; None if `choice` says what it may."""
    parallel: bool = True
    """Whether a message may have several calls."""
    strict: tuple[str, ...] = ()
    """The functions whose arguments must have the schema of their parameters."""

    @property
    def is_forced(self) -> bool:
        """Whether the model must make a call."""
        return self.choice is ToolChoice.REQUIRED or self.function is not None

    def has_schema(self, name: str) -> bool:
        """Whether the arguments of this function must have the schema of its parameters."""
        return name == self.function if self.function else self.is_forced or name in self.strict

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(definition["function"]["name"] for definition in self.definitions)


@dataclass(frozen=True, slots=True)
class RequestedSampling(Sampling):
    """The sampling parameters that the client sent, not checked yet.

    None takes the value of the model's generation_config, then the parameter's neutral value; a
    seed is drawn at admission, and max_tokens is the limit of context and pool.
    """

    default_max_tokens: int | None = None
    """Limit of generated tokens if `max_tokens` is None; None for the limit of context and pool."""
    structure: Structure | None = None
    """The form of the text, in place of `structured_outputs`; None for any."""


def new_resume_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class RetainDirective:
    """Asks to retain a prefix of the prompt in the cache for a time."""

    ttl_s: int
    name: str = ""
    """Replaces an earlier prefix of the same name; if empty, the prefix itself is the name."""
    until: tuple[ChatMessage, ...] | None = None
    """A chat whose common beginning with the prompt is the prefix; None is the whole prompt."""
    num_tokens: int | None = None
    """The length of the prefix, which admission finds."""


@dataclass(frozen=True, slots=True)
class RetainedPrefix:
    """A retention, as its owner sees it."""

    name: str
    tenant: str
    model: str
    pool_id: str
    num_tokens: int
    num_cached_tokens: int | None
    """The tokens that the cache has now; None if the caller may not know."""
    left_s: float


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The fields that a request for text and a request for an embedding share."""

    prompt: Prompt
    request_id: str = ""
    """The gateway generates one if it is empty."""
    model: str = ""
    _: KW_ONLY
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    """Seconds until the client's deadline; None without a deadline."""
    resume_token: str = field(default_factory=new_resume_token, compare=False)
    """The secret that a client needs to continue the request."""
    add_special_tokens: bool = True
    """Whether a text gets the tokenizer's special tokens; a chat has its template's."""
    add_generation_prompt: bool = True
    """Whether the template adds the beginning of the assistant's answer to a chat."""
    template_arguments: TemplateArguments = field(default_factory=dict)
    tools: RequestedTools | None = None
    truncation: Truncation | None = None
    """How a prompt that is too long is cut; None if it is refused."""
    is_further: bool = False
    """Whether it is not the first request of its call, which a key's rate counts once."""
    caller: Caller = field(default_factory=partial(current_caller, EVERYONE))
    """The caller of the call that makes this request."""


@dataclass(frozen=True, slots=True)
class GenerationRequest(PromptRequest):
    """A request for text, as the gRPC or HTTP server received it; admission checks it and makes a
    `services.gateway.request.request.Request` of it."""

    sampling: RequestedSampling = field(default=RequestedSampling())
    received: tuple[Received, ...] | None = None
    """The sequences that the client received in part in a call that broke; None if the request is
    new."""
    echo: bool = False
    """Report the prompt too."""
    wants_parts: bool = False
    """Deltas of a chat have the parts of its message, if the model's format is known."""
    running_usage: bool = False
    """Every delta has the usage so far; otherwise only the last one has the usage."""
    include_metrics: bool = False
    """The last delta has the request's figures."""
    retain: tuple[RetainDirective, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingRequest(PromptRequest):
    """A request for the embedding of a prompt. It is not resumed: its client asks again."""

    dimensions: int | None = None
    """The number of values of the embedding; None for all."""
    query: str | None = None
    """The text before the prompt, for the score that a cross-encoder gives the pair."""


@dataclass(frozen=True, slots=True)
class Embedded:
    request_id: str
    values: tuple[float, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ServedModel(Model):
    """A model under one of its names."""

    root: str = ""
    """The model's own name, if `id` is an alias."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...] | None
    """As the vocabulary spells them; None if the request asks for none."""
    max_model_len: int


Deltas = AbstractAsyncContextManager[AsyncIterator[Delta]]
"""An answer that is read delta by delta while its block is open."""


class Generator(Protocol):
    """Generates text for requests: the gateway, as its gRPC and HTTP servers see it."""

    def generate(self, request: GenerationRequest) -> Deltas:
        """Opens the answer to one request. Leaving the block cancels the request at every process
        that works on it.

        Opening and reading raise InvalidRequest, PromptTooLong, UnknownModel, DuplicateRequest,
        QueueFull, RateLimited, NoWorker, DeadlineExceeded or PoisonRequest
        (services.runtime.errors).
        """

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """The embedding of a prompt. Raises as `generate`."""

    async def retain(self, request: GenerationRequest) -> RetainAnswer:
        """Retains the prefix that the request names, without computing it. Raises as `generate`."""

    async def retained(self, caller: Caller) -> tuple[RetainedPrefix, ...]:
        """The prefixes that the caller retains; an operator sees the prefixes of all tenants."""

    async def drop_retained(self, name: str, caller: Caller, tenant: str | None = None) -> bool:
        """No longer retains a prefix; an operator may name its tenant. Returns whether it was
        retained."""

    async def scores_pairs(self, model: str, request_id: str) -> bool:
        """Whether the model is a cross-encoder. Records and raises as `generate` does."""

    async def tokenize(self, request: GenerationRequest, *, with_tokens: bool = False) -> Tokenized:
        """The prompt of a request, as it would be computed. Raises InvalidRequest, PromptTooLong,
        UnknownModel, NoWorker, Overloaded or RateLimited."""

    async def detokenize(self, token_ids: tuple[int, ...], model: str) -> str:
        """The text of tokens, special tokens included. Raises as `tokenize`."""

    def explain(self, request_id: str, caller: Caller) -> list[str]:
        """The story of a request that the caller may see. Raises UnknownRequest."""

    async def forecast(self, request: GenerationRequest) -> list[str]:
        """Tell in sentences what would happen to a request now. Raises as `tokenize`."""

    def record_refusal(self, request_id: str, model: str, code: str, reason: str) -> None:
        """Counts and logs a request that a server refused without calling `generate`. `model` is
        the name that the client sent, or empty if it is not known."""

    def models(self) -> tuple[ServedModel, ...]:
        """The models that the current caller sees and that can be served now, sorted by name."""

    def ready(self) -> bool:
        """Whether at least one model has a worker of every role."""
