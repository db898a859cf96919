"""The types of the answers, for /openapi.json. A test compares them with the answers.

The answers themselves are plain dictionaries, which are faster to make and to serialize.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict


@with_config(ConfigDict(extra="forbid"))
class _Exact(TypedDict):
    """Has no other fields than those that are declared."""


class Error(_Exact):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class Failure(_Exact):
    error: Error


class PromptDetails(_Exact):
    cached_tokens: int
    cache_write_tokens: int


class Retained(_Exact):
    name: str
    status: Literal["accepted", "clipped", "rejected"]
    asked_tokens: int
    retained_tokens: int
    ttl: int
    reason: str | None


class CompletionDetails(_Exact):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    completion_tokens_details: CompletionDetails | None
    retained: NotRequired[list[Retained]]


class CacheAnswer(Retained):
    object: Literal["cache.retention"]
    expires_at: int | None
    usage: Usage | None


class RetainedPrefix(_Exact):
    object: Literal["cache.retention"]
    name: str
    tenant: str
    model: str
    pool: str
    retained_tokens: int
    cached_tokens: int | None
    expires_at: int


class RetainedPrefixes(_Exact):
    object: Literal["list"]
    data: list[RetainedPrefix]


class Dropped(_Exact):
    object: Literal["cache.retention"]
    name: str
    deleted: Literal[True]


class TextLogprobs(_Exact):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(_Exact):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Exact):
    content: list[TokenLogprob]


class PromptLogprob(_Exact):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(_Exact):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Function(_Exact):
    name: str
    arguments: str


class ToolCall(_Exact):
    id: str
    type: Literal["function"]
    function: Function


class Message(_Exact):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class Completion(_Exact):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: NotRequired[dict[str, float | None]]
    quire: NotRequired[dict[str, Any]]


class TextCompletion(Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class OutputText(_Exact):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(_Exact):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class FunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Literal["completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class Response(TypedDict):
    """OpenAI's response object; the fields that repeat the request are left out here."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessage | FunctionCall | ReasoningOutput]
    store: Literal[False]
    usage: dict[str, Any] | None
    metrics: NotRequired[dict[str, float | None]]
    quire: NotRequired[dict[str, Any]]


class AnthropicFailure(_Exact):
    type: Literal["error"]
    error: dict[str, str]
    request_id: str


class AnthropicMessage(_Exact):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, Any]
    metrics: NotRequired[dict[str, float | None]]
    quire: NotRequired[dict[str, Any]]


class InputTokens(_Exact):
    input_tokens: int


class EmbeddingUsage(_Exact):
    prompt_tokens: int
    total_tokens: int


class Embedding(_Exact):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Exact):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Scores(_Exact):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: EmbeddingUsage


class Ranks(_Exact):
    id: str
    model: str
    results: list[dict[str, Any]]
    usage: EmbeddingUsage


class Tokens(_Exact):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Exact):
    prompt: str


class Model(_Exact):
    id: str
    parent: NotRequired[str]
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    block_size: int
    dtype: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int


class Models(_Exact):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: NotRequired[str]
    last_id: NotRequired[str]


class Health(_Exact):
    status: Literal["serving", "not_serving"]


class Version(_Exact):
    version: str
