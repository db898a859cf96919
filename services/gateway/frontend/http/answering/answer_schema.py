"""The types of the answers, for /openapi.json. A test compares them with the answers.

The answers themselves are plain dictionaries, which are faster to make and to serialize.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_exact = with_config(ConfigDict(extra="forbid"))


@_exact
class Error(TypedDict):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


@_exact
class Failure(TypedDict):
    error: Error


@_exact
class PromptDetails(TypedDict):
    cached_tokens: int


@_exact
class CompletionDetails(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@_exact
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    completion_tokens_details: CompletionDetails | None


@_exact
class TextLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


@_exact
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@_exact
class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


@_exact
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


@_exact
class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


@_exact
class Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


@_exact
class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]


@_exact
class Function(TypedDict):
    name: str
    arguments: str


@_exact
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


@_exact
class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@_exact
class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


@_exact
class Completion(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage


@_exact
class TextCompletion(Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


@_exact
class ChatCompletion(Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


@_exact
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


@_exact
class OutputMessage(TypedDict):
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


@_exact
class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@_exact
class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@_exact
class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@_exact
class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@_exact
class Text(TypedDict):
    prompt: str


@_exact
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    block_size: int
    dtype: str


@_exact
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@_exact
class Health(TypedDict):
    status: Literal["serving", "not_serving"]


@_exact
class Version(TypedDict):
    version: str
