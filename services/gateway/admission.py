"""What a request must be before it may wait: valid, tokenized, with every default resolved, and
able to fit at all. Whatever is wrong is said here, at once, with the numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockstore.store import PoolSpec
from services.common.errors import InvalidRequest, PromptTooLong
from services.common.logprobs import MAX_LOGPROBS
from services.common.ticket import PRIORITY_CLASSES, SamplingParams
from services.gateway.api import GenerationRequest
from services.gateway.checks import check_text, require
from services.gateway.fleet import Served
from services.gateway.prompts import check_token_ids, token_ids_of
from services.gateway.sampling import resolve_sampling

MAX_ID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_PROMPT_LOGPROBS = 1 << 18
"""They come all at once: some 7 MB of a message, which may have 16 MiB."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may wait. `arrived_at` and `deadline` are times of the event loop's clock;
    `received`: tokens that its client has of a call that broke; None: a new request."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    priority: int
    cache_salt: str
    arrived_at: float
    deadline: float | None
    vocab_size: int
    received: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    include_stop_str: bool = False
    skip_special_tokens: bool = True

    def continues(self, other: "Admitted") -> bool:
        """Whether this is the same request as another one. A greedy one has no use for its seed."""
        seed = self.sampling.seed if self.sampling.temperature else other.sampling.seed
        return (
            (self.model, self.prompt_token_ids) == (other.model, other.prompt_token_ids)
            and replace(self.sampling, seed=seed) == other.sampling
            and (self.stop, self.cache_salt) == (other.stop, other.cache_salt)
            and self.prompt_logprobs == other.prompt_logprobs
            and self.include_stop_str == other.include_stop_str
            and self.skip_special_tokens == other.skip_special_tokens
        )

    def misfit(self, spec: PoolSpec) -> str:
        """Why it can never fit a pool; "" when it can."""
        return misfit(len(self.prompt_token_ids), self.sampling.max_tokens, spec)


async def admit(
    request: GenerationRequest,
    request_id: str,
    name: str,
    served: Served,
    arrived_at: float,
    deadline: float | None,
) -> Admitted:
    """InvalidRequest, PromptTooLong."""
    check_names(request_id, request.cache_salt, request.priority)
    check_logprobs("logprobs", request.sampling.logprobs)
    check_logprobs("prompt_logprobs", request.sampling.prompt_logprobs)
    sampling = await resolve_sampling(request.sampling, served.model)
    prompt = await token_ids_of(request.prompt, served.model, served.max_model_len)
    max_tokens = resolve_max_tokens(
        len(prompt), request.sampling.max_tokens, served.max_model_len, served.specs
    )
    check_prompt_logprobs(len(prompt), request.sampling.prompt_logprobs)
    require(
        sampling.min_tokens <= max_tokens,
        f"min_tokens is {sampling.min_tokens}, max_tokens only {max_tokens}",
    )
    check_received(request, max_tokens, sampling.temperature, served.model.config.vocab_size)
    return Admitted(
        request_id=request_id,
        model=name,
        prompt_token_ids=prompt,
        sampling=replace(sampling, max_tokens=max_tokens, logprobs=request.sampling.logprobs),
        stop=request.sampling.stop,
        include_stop_str=request.sampling.include_stop_str_in_output,
        skip_special_tokens=request.sampling.skip_special_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
        arrived_at=arrived_at,
        deadline=deadline,
        vocab_size=served.model.config.vocab_size,
        received=request.received,
        prompt_logprobs=request.sampling.prompt_logprobs,
    )


def check_names(request_id: str, cache_salt: str, priority: int) -> None:
    check_text("request_id", request_id, MAX_ID_CHARS)
    check_text("cache_salt", cache_salt, MAX_SALT_CHARS)
    low, high = PRIORITY_CLASSES[0], PRIORITY_CLASSES[-1]
    require(low <= priority <= high, f"priority is {priority}, not in [{low}, {high}]")


def check_logprobs(name: str, num_top: int | None) -> None:
    require(
        num_top is None or 0 <= num_top <= MAX_LOGPROBS,
        f"{name} is {num_top}, not in [0, {MAX_LOGPROBS}]",
    )


def check_prompt_logprobs(num_prompt: int, num_top: int | None) -> None:
    num_logprobs = 0 if num_top is None else num_prompt * (1 + num_top)
    require(
        num_logprobs <= MAX_PROMPT_LOGPROBS,
        f"prompt_logprobs {num_top} of {num_prompt} tokens are {num_logprobs} logprobs, at most "
        f"{MAX_PROMPT_LOGPROBS}",
    )


def check_received(
    request: GenerationRequest, max_tokens: int, temperature: float, vocab_size: int
) -> None:
    """What it takes to go on with a request that another call began."""
    if request.received is None:
        return
    num_received = len(request.received)
    require(bool(request.request_id), "received tokens, but no request_id")
    require(
        not temperature or request.sampling.seed is not None,
        "a sampled request goes on with its seed only",
    )
    require(
        num_received < max_tokens, f"{num_received} tokens received, max_tokens is {max_tokens}"
    )
    check_token_ids("received", request.received, vocab_size)


def resolve_max_tokens(
    num_prompt: int, asked: int | None, max_model_len: int, specs: Sequence[PoolSpec]
) -> int:
    """As asked for, where it fits; absent: all that context and largest pool leave."""
    if num_prompt + 1 > max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens; the model's context of {max_model_len} leaves "
            "room for none to generate"
        )
    if asked is not None and num_prompt + asked > max_model_len:
        raise InvalidRequest(
            f"the prompt's {num_prompt} tokens and max_tokens {asked} are {num_prompt + asked}; "
            f"the model's context is {max_model_len}"
        )
    pool = max(specs, key=lambda spec: spec.num_blocks * spec.block_size)
    room = pool.num_blocks * pool.block_size - num_prompt
    max_tokens = min(max_model_len - num_prompt, max(room, 1)) if asked is None else asked
    if problem := misfit(num_prompt, max_tokens, pool):
        raise PromptTooLong(problem)
    return max_tokens


def misfit(num_prompt: int, max_tokens: int, spec: PoolSpec) -> str:
    """Why a request can never fit a pool; "" when it can."""
    num_blocks = math.ceil((num_prompt + max_tokens) / spec.block_size)
    if num_blocks <= spec.num_blocks:
        return ""
    return (
        f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) need {num_blocks} blocks of "
        f"{spec.block_size} tokens; the pool has {spec.num_blocks}"
    )
