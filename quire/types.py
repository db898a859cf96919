"""What a client sends and gets, as plain frozen dataclasses; protobuf stays in `quire.messages`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
WorkerState = Literal["unknown", "starting", "serving", "draining", "fenced"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role` as the model's chat template knows it: system, user, assistant ... `name`: for chat
    templates that know several speakers of a role."""

    role: str
    content: str
    name: str = ""


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text that the model goes on with, token ids, or a conversation for its chat template."""


@dataclass(frozen=True, slots=True)
class Beam:
    """Search with so many beams, 1 to 16: `num_beams`, `length_penalty` (None: 1) and
    `early_stopping` of transformers' `generate`, whose results it has."""

    width: int
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. None takes the model's generation_config, then the server's default.

    `temperature` 0 is greedy; `top_k` 0 keeps all; `max_tokens` None goes up to the context.
    `n` sequences are drawn for the prompt, by one seed: all from one computation of it. `best_of`:
    so many are drawn, and the `n` likeliest of them come, best first, whole and at the end.
    `logprobs`: tell each token's logprob, and those of so many of the likeliest beside it; None:
    tell none. `prompt_logprobs`: the same of the prompt's tokens but the first.
    `logit_bias`: token id to what is added to its logit. `allowed_token_ids`: None allows all.
    `bad_words` never come; `min_tokens` come before anything that ends the generation.
    `beam`: search instead; the answer comes whole, at the end, best sequence first.
    """

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
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    beam: Beam | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could be at some position. `logprob`: before temperature, penalties and filters.
    `rank`: 1 + how many tokens are likelier. `token`: its UTF-8, or part of a character."""

    token_id: int
    logprob: float
    rank: int
    token: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the token that is there, and the likeliest, likeliest first."""

    chosen: Candidate
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """`num_cached_tokens`: None unless the request has a `cache_salt`, or the gateway reports it
    for every request (`quire serve --report-cached-tokens`)."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_generated_tokens: int
    time_to_first_token_ms: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence of a request gained. `index`: 0 to n - 1.

    `finish_reason` is set in its last delta, with the stop string or token that ended it, if one
    did; `usage` is set in the last delta of the request. `logprobs`: of each token, where asked
    for; `prompt_logprobs`: of each token of the prompt but the first, in the first delta. `score`:
    of a sequence that was chosen (`best_of`), the mean of its logprobs; of one that a beam search
    found, its log-probability by its length to the power of `length_penalty`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an answer. `stopped_by`: the stop string or token that ended it, if any.
    `score`: as a delta's."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stopped_by: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's whole answer: `choices` by index, as many as were asked for, and the `usage` of
    all together. `text`, `token_ids`, `finish_reason` and `logprobs` are the first choice's: for
    `n` = 1."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

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


@dataclass(frozen=True, slots=True)
class Model:
    """`max_model_len`: longest prompt + generation, in tokens."""

    id: str
    max_model_len: int
    block_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Pool:
    """num_free + num_cached + num_held == num_blocks, always (law 1), but while `recovering`: Redis
    lost its ledger, and `missing_worker_ids` have not told it yet what they hold."""

    pool_id: str
    model: str
    fingerprint: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_waiters: int
    worker_ids: tuple[str, ...]
    num_prefix_queries: int
    num_prefix_hits: int
    recovering: bool = False
    missing_worker_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """`num_free_slots`: sequences a decode worker can still take. `engine`: what computes."""

    worker_id: str
    role: str
    address: str
    pool_id: str
    model: str
    state: WorkerState
    num_running: int
    num_waiting: int
    num_free_slots: int
    num_pending_tokens: int
    engine: Mapping[str, str]
    started_unix_ms: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """What a run has once the workers named `starting` serve, and those `leaving` have left.
    `failing`: workers that do not start, with the last line that each wrote."""

    num_prefill: int
    num_decode: int
    starting: tuple[str, ...]
    leaving: tuple[str, ...]
    failing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """A recount of one pool. `ledger_checked` is False when the pool kept changing, so that only
    its counters were checked, and while it is `recovering`; `violations` is empty when every law
    holds."""

    pool_id: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_references: int
    ledger_checked: bool
    violations: tuple[str, ...]
    recovering: bool = False
