"""A request that is checked, tokenized and complete."""

import math
from dataclasses import dataclass

from blockstore.records import PoolSpec
from services.gateway.access.caller import EVERYONE, Caller
from services.gateway.api import Received
from services.gateway.parsing.message import Parsing
from services.gateway.request.trace import RequestTrace
from services.protocol.ticket import Adapter, SamplingParams


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that is checked, tokenized and complete, so that it may wait for workers."""

    request_id: str
    """The scoped id (`services.gateway.identity`), which gateway and workers use."""
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    priority: int
    cache_salt: str
    """The salt of the prefix hashes: the client's, scoped by its tenant."""
    arrived_at: float
    """A time of the event loop's clock, like `deadline`."""
    deadline: float | None
    vocab_size: int
    num_sequences: int = 1
    received: tuple[Received, ...] | None = None
    """The sequences that the client received in a call that broke; None: a new request."""
    prompt_logprobs: int | None = None
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    parsing: Parsing | None = None
    """How to parse the messages; None: the client gets text only."""
    caller: Caller = EVERYONE
    trace: RequestTrace | None = None
    """None: the request is not traced."""
    adapter: Adapter | None = None
    """The LoRA adapter that the client names as its model; None: it names the model."""

    def continues(self, other: "AdmittedRequest") -> bool:
        """Whether `other` is the same request, so that this call can continue it."""
        return (
            (self.model, self.prompt_token_ids) == (other.model, other.prompt_token_ids)
            and self.adapter == other.adapter
            and self.sampling.samples_like(other.sampling)
            and (self.stop, self.cache_salt) == (other.stop, other.cache_salt)
            and self.prompt_logprobs == other.prompt_logprobs
            and self.include_stop_str == other.include_stop_str
            and self.skip_special_tokens == other.skip_special_tokens
            and self.parsing == other.parsing
            and self.num_sequences == other.num_sequences
        )

    @property
    def has_received_tokens(self) -> bool:
        """Whether the client has received tokens, and so the prompt's report too."""
        return any(each.token_ids for each in self.received or ())

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens that the client has not received need logprobs."""
        of_prompt = self.prompt_logprobs is not None and not self.has_received_tokens
        return self.sampling.logprobs is not None or of_prompt

    @property
    def width(self) -> int:
        """The number of sequences that run at the same time: `num_sequences`, or the beams."""
        return self.num_sequences if self.sampling.beam is None else self.sampling.beam.width

    def capacity_problem(self, spec: PoolSpec) -> str:
        """Why the request can never fit a pool with this spec; "" if it can."""
        num_prompt, max_tokens = len(self.prompt_token_ids), self.sampling.max_tokens
        return capacity_problem(num_prompt, max_tokens, spec, self.width)


def capacity_problem(num_prompt: int, max_tokens: int, spec: PoolSpec, num_sequences: int) -> str:
    """Why a request can never fit a pool with this spec; "" if it can.

    The sequences of a request share the full blocks of its prompt.
    """
    num_shared = num_prompt // spec.block_size
    num_own = math.ceil((num_prompt + max_tokens) / spec.block_size) - num_shared
    num_blocks = num_shared + num_sequences * num_own
    if num_blocks <= spec.num_blocks:
        return ""
    times = f", {num_sequences} times," if num_sequences > 1 else ""
    return (
        f"its KV pool has room for {spec.num_blocks * spec.block_size} tokens: prompt "
        f"({num_prompt} tokens) and max_tokens ({max_tokens}){times} need {num_blocks} blocks of "
        f"{spec.block_size} tokens; the pool has {spec.num_blocks}"
    )
