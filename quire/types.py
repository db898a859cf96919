"""Requests and answers of the client library, as frozen dataclasses without protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.sampling import Beam as Beam
from quire.sampling import SamplingNumbers

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    """A role of the model's chat template: system, user, assistant ..."""
    content: str
    name: str = ""
    """The speaker, for chat templates that distinguish speakers of one role."""


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""A text or token ids that the model continues, or a conversation for its chat template."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of the generated text; exactly one of the fields is given, as in vLLM."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """A regular expression that matches all of the text."""
    choice: Sequence[str] | None = None
    """The texts to choose from: exactly one of them is generated."""
    grammar: str | None = None
    """A grammar of Lark, or in llama.cpp's EBNF."""
    json_object: bool | None = None
    """True asks for any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """A structural tag in JSON, which gives a form to parts of the text."""


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers[float | None, int | None]):
    """Sampling parameters: the numbers of `SamplingNumbers` and these. None takes the value of the
    model's generation_config, or else the server's default."""

    seed: int | None = None
    """A number of 64 bits; a negative seed is the same as seed + 2**64."""
    max_tokens: int | None = None
    """The most tokens to generate; None allows as many as the context has room for."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """The number of sequences, which share one seed and one prefill."""
    logprobs: int | None = None
    """The number of likeliest tokens to return with the logprob of each token; None returns no
    logprobs."""
    prompt_logprobs: int | None = None
    """The number of likeliest tokens to return for each token of the prompt but the first."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Biases that are added to the logits, by token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None allows all."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never generated."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    beam: Beam | None = None
    """A beam search in place of sampling; whole sequences come at the end, best first."""
    structured_outputs: StructuredOutput | None = None
    """The form of the text; None allows any text."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token with its logprob at one position, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int
    """1 + the number of likelier tokens."""
    token: bytes
    """The token in UTF-8, which may be a part of a character, or the name of a special token."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs of one position: the token that was chosen, and the `top` likeliest tokens,
    likeliest first."""

    chosen: Candidate
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Retain:
    """A wish to keep a prefix of the prompt in the cache for a time."""

    ttl_s: int
    """The time in seconds, at most 7 days."""
    name: str = ""
    """The name under which the prefix replaces an earlier one; an empty name is made from it."""
    num_messages: int | None = None
    """The number of the chat's messages in the prefix; None means the whole prompt."""


@dataclass(frozen=True, slots=True)
class RetainAnswer:
    """The answer to a wish to retain a prefix."""

    name: str
    status: Literal["accepted", "clipped", "rejected"]
    num_asked_tokens: int
    """The tokens of the prefix."""
    num_tokens: int
    """The tokens that are retained: the prefix's full blocks, as far as there is room."""
    ttl_s: int
    reason: str = ""
    """Why the prefix is not retained, or not all of it."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where the time of one request went. The times of queue, prefill, hand-off and decode add up
    to the time since its arrival; the fields from `queue_time_ms` on are vLLM's."""

    queue_ms: float
    """The time before the prefill began, and again after each preemption and lost worker."""
    placement: tuple[str, ...]
    """The names of the workers that had the request, in order."""
    prefill_ms: float
    handoff_ms: float
    """The time from a prefill's end to the first token of a decode worker, and the time of
    moves."""
    decode_ms: float
    cached_tokens: int | None
    """As `Usage.num_cached_tokens`."""
    preemptions: int
    moves: int
    queue_time_ms: float
    """The time from the arrival to the beginning of the first prefill."""
    time_to_first_token_ms: float
    """The time from there to the first token. (`Usage` has the time from the arrival.)"""
    generation_time_ms: float
    """The time from the first token to the last one."""
    mean_itl_ms: float | None
    """The mean time between two tokens; None with several sequences or fewer than two tokens."""
    tokens_per_second: float | None
    """The generated tokens of all sequences in a second of `generation_time_ms`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one request."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    """The prompt tokens that the prefix cache had. The number could reveal prompts of other
    clients, so it is None unless the request has a `cache_salt` or the gateway reports it to
    everybody (`quire serve --report-cached-tokens`)."""
    num_generated_tokens: int
    time_to_first_token_ms: float
    """The time from the arrival at the gateway."""
    num_preemptions: int
    num_accepted_drafts: int = 0
    """The drafts of speculative decoding that became tokens."""
    num_rejected_drafts: int = 0
    metrics: RequestMetrics | None = None
    """The figures of the request, if it or the gateway asks for them, in its last delta."""
    num_written_tokens: int | None = None
    """The prompt tokens that were computed into blocks of the prefix cache; None where
    `num_cached_tokens` is None."""
    retained: tuple[RetainAnswer, ...] = ()
    """The answers to the request's wishes to retain prefixes."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and text of one sequence of a request."""

    request_id: str
    index: int
    """The number of the sequence, from 0 on."""
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    """The reason of the end, in the last delta of the sequence."""
    stopped_by: str | int | None = None
    """The stop string or token id that ended the sequence, if one did."""
    usage: Usage | None = None
    """The counts of the request, in its last delta."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """The logprobs of each token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The logprobs of each prompt token but the first, in the first delta, if the request asks."""
    score: float | None = None
    """The score in a beam search: the sum of logprobs / length ** `length_penalty`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete sequence of an answer, with the fields of `Delta`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stopped_by: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None
    message: Mapping[str, Any] | None = field(default=None, hash=False)
    """The assistant's message of `LLM.chat` in OpenAI's format, with `reasoning_content` and
    `tool_calls` if the model has written them."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for `LLM`, with vLLM's fields. `lora_int_id` has no meaning here."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a prompt: a vector of length 1."""

    values: tuple[float, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete answer to a request. For requests of one sequence, the fields of the first
    choice are also fields of the answer. `outputs`, `prompt` and `prompt_token_ids` are vLLM's
    names."""

    request_id: str
    choices: tuple[Choice, ...]
    """All sequences, by index."""
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: str | None = None
    """The text that `LLM` got, for a chat as the template renders it; None for token ids."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt of `LLM` as the model gets it."""

    @property
    def outputs(self) -> tuple[Choice, ...]:
        return self.choices

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs
