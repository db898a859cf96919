"""What the gateway does, free of gRPC and HTTP: both front doors speak to `Generator` in these
types."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.protocol.ticket import EarlyStopping, FinishReason


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str = ""
    """For chat templates that know several speakers of a role; "" where it has none."""


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]
"""Text, token ids, or a conversation for the model's chat template."""

TemplateArguments = Mapping[str, Any]
"""What a client tells the chat template beside the messages."""


@dataclass(frozen=True, slots=True)
class RequestedBeams:
    """Beam search, as the client wrote it; `length_penalty` None is 1."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping = EarlyStopping.WHEN_UNLIKELY


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """As the client wrote it: None takes the model's generation_config, then the field's default
    (temperature 1, top_k 0 = all, top_p 1, min_p 0, repetition_penalty 1, a seed drawn at
    admission, max_tokens up to the context and the pool, min_tokens 0).
    `n`: how many sequences are drawn for the prompt, by one seed; `best_of`: so many are, and the
    `n` best of them are the answer; None: all are."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    """Tell each token's logprob, and of so many of the likeliest; None: tell none."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first."""
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    usual_tokens: int | None = None
    """Most tokens where `max_tokens` is None; None: what context and pool leave."""
    beam: RequestedBeams | None = None

    @property
    def width(self) -> int:
        """How many sequences run for it at a time."""
        if self.beam is not None:
            return self.beam.width
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Whether fewer are told than are drawn."""
        return self.best_of is not None and self.best_of > self.n


@dataclass(frozen=True, slots=True)
class Received:
    """What a client has got of one sequence; with its `finish_reason`, all."""

    index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`request_id` is drawn when empty; `timeout_s` is what the client gave it, None for no
    deadline. `received`: what the client has of a call that broke, of each sequence of which it has
    anything; None: a new request. `resume_token`: the secret that a client needs to go on with the
    request; a front door draws it when empty. `echo`: tell the prompt too. `template_arguments`:
    variables of the chat template. `running_usage`: every delta has the usage so far, not only the
    last."""

    prompt: Prompt
    request_id: str = ""
    model: str = ""
    sampling: RequestedSampling = field(default=RequestedSampling())
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    received: tuple[Received, ...] | None = None
    resume_token: str = ""
    echo: bool = False
    template_arguments: TemplateArguments = field(default_factory=dict)
    running_usage: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """`num_cached_tokens`: None where the client may not know."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_generated_tokens: int
    time_to_first_token_ms: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could be at some position. `rank`: 1 + how many have a larger logit. `token`:
    its UTF-8, or part of a character; a special token's name."""

    token_id: int
    logprob: float
    rank: int
    token: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the token that is there, and the likeliest, likeliest first. `text_offset`:
    how many characters of the text are before it."""

    chosen: Candidate
    top: tuple[Candidate, ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class PromptReport:
    """A prompt as its client gets it back. `logprobs`: of each token but the first, or of none
    where they were not asked for. `first_token`: as a candidate's `token`."""

    text: str
    token_ids: tuple[int, ...]
    first_token: bytes
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a sequence gained. `text` has whole characters only and nothing of a stop string. The
    last delta of a sequence has its `finish_reason` and, where a stop ended it, `stopped_by`; the
    last of the request has `usage`, or each, where asked for. `logprobs`: of each token, where
    asked for.
    `prompt`: in the request's first delta, where asked for. `score`: of a sequence that was chosen,
    the mean of its logprobs; of one that a beam search found, that search's."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptReport | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    model: str
    max_model_len: int
    block_size: int
    dtype: str


class Generator(Protocol):
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Stream one request. Closing the iterator cancels it at every hop.

        Raises, before the first delta or in its place: InvalidRequest, PromptTooLong, UnknownModel,
        DuplicateRequest, QueueFull, WouldBeLate, NoWorker, DeadlineExceeded, KVCorrupt
        (services.common.errors).
        """

    def refused(self, request_id: str, model: str, code: str, reason: str) -> None:
        """Count and log a request that was refused before `generate` heard of it. `model`: as the
        client names it; empty: not known."""

    def models(self) -> tuple[ServedModel, ...]:
        """The models that can be served now, sorted by name."""

    def ready(self) -> bool:
        """Whether every kind of worker is there for at least one model."""
