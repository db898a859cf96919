"""What a request must be before it may wait: valid, tokenized, with every default resolved, and
able to fit at all. Whatever is wrong is said here, at once, with the numbers."""

import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockstore.store import PoolSpec
from services.common.errors import InvalidRequest, PromptTooLong
from services.common.logprobs import MAX_LOGPROBS
from services.common.text.model_config import GenerationDefaults
from services.common.ticket import PRIORITY_CLASSES, SamplingParams
from services.gateway.api import GenerationRequest, RequestedSampling
from services.gateway.fleet import Served
from services.gateway.prompts import check_token_ids, token_ids_of

MAX_ID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_PROMPT_LOGPROBS = 1 << 18
"""They come all at once: some 7 MB of a message, which may have 16 MiB."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
_UINT64 = 1 << 64


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

    def continues(self, other: "Admitted") -> bool:
        """Whether this is the same request as another one. A greedy one has no use for its seed."""
        seed = self.sampling.seed if self.sampling.temperature else other.sampling.seed
        return (
            (self.model, self.prompt_token_ids) == (other.model, other.prompt_token_ids)
            and replace(self.sampling, seed=seed) == other.sampling
            and (self.stop, self.cache_salt) == (other.stop, other.cache_salt)
            and self.prompt_logprobs == other.prompt_logprobs
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
    check_stops(request.sampling, served.model.config.vocab_size)
    sampling = resolve_sampling(request.sampling, served.model.config.generation)
    prompt = await token_ids_of(request.prompt, served.model, served.max_model_len)
    max_tokens = resolve_max_tokens(
        len(prompt), request.sampling.max_tokens, served.max_model_len, served.specs
    )
    check_prompt_logprobs(len(prompt), request.sampling.prompt_logprobs)
    check_received(request, max_tokens, sampling.temperature, served.model.config.vocab_size)
    return Admitted(
        request_id=request_id,
        model=name,
        prompt_token_ids=prompt,
        sampling=replace(sampling, max_tokens=max_tokens, logprobs=request.sampling.logprobs),
        stop=request.sampling.stop,
        priority=request.priority,
        cache_salt=request.cache_salt,
        arrived_at=arrived_at,
        deadline=deadline,
        vocab_size=served.model.config.vocab_size,
        received=request.received,
        prompt_logprobs=request.sampling.prompt_logprobs,
    )


def check_names(request_id: str, cache_salt: str, priority: int) -> None:
    _check_text("request_id", request_id, MAX_ID_CHARS)
    _check_text("cache_salt", cache_salt, MAX_SALT_CHARS)
    low, high = PRIORITY_CLASSES[0], PRIORITY_CLASSES[-1]
    _require(low <= priority <= high, f"priority is {priority}, not in [{low}, {high}]")


def check_logprobs(name: str, num_top: int | None) -> None:
    _require(
        num_top is None or 0 <= num_top <= MAX_LOGPROBS,
        f"{name} is {num_top}, not in [0, {MAX_LOGPROBS}]",
    )


def check_prompt_logprobs(num_prompt: int, num_top: int | None) -> None:
    num_logprobs = 0 if num_top is None else num_prompt * (1 + num_top)
    _require(
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
    _require(bool(request.request_id), "received tokens, but no request_id")
    _require(
        not temperature or request.sampling.seed is not None,
        "a sampled request goes on with its seed only",
    )
    _require(
        num_received < max_tokens, f"{num_received} tokens received, max_tokens is {max_tokens}"
    )
    check_token_ids("received", request.received, vocab_size)


def check_stops(asked: RequestedSampling, vocab_size: int) -> None:
    num_stops, num_ids = len(asked.stop), len(asked.stop_token_ids)
    _require(num_stops <= MAX_STOP_STRINGS, f"{num_stops} stop strings, at most {MAX_STOP_STRINGS}")
    _require(
        num_ids <= MAX_STOP_TOKEN_IDS, f"{num_ids} stop_token_ids, at most {MAX_STOP_TOKEN_IDS}"
    )
    for stop in asked.stop:
        _require(bool(stop), "a stop string is empty")
        _check_text("a stop string", stop, MAX_STOP_CHARS)
    check_token_ids("stop_token_ids", asked.stop_token_ids, vocab_size)


def resolve_sampling(asked: RequestedSampling, defaults: GenerationDefaults) -> SamplingParams:
    """Asked for, else the model's own, else neutral; `max_tokens` depends on the prompt and comes
    later. Floats are rounded to the 32 bits that travel: what is checked is what is sampled with.
    """
    temperature = _float32("temperature", _first(asked.temperature, defaults.temperature, 1.0))
    top_p = _float32("top_p", _first(asked.top_p, defaults.top_p, 1.0))
    min_p = _float32("min_p", _first(asked.min_p, defaults.min_p, 0.0))
    top_k = int(_first(asked.top_k, defaults.top_k, 0))
    seed = secrets.randbits(64) if asked.seed is None else asked.seed
    _require(temperature >= 0, f"temperature is {temperature:g}, not 0 or more")
    _require(0 < top_p <= 1, f"top_p is {top_p:g}, not in (0, 1]")
    _require(0 <= min_p <= 1, f"min_p is {min_p:g}, not in [0, 1]")
    _require(-1 <= top_k < 1 << 31, f"top_k is {top_k}, not -1, 0 (all) or a number of tokens")
    _require(
        asked.max_tokens is None or asked.max_tokens >= 1,
        f"max_tokens is {asked.max_tokens}, not 1 or more",
    )
    _require(0 <= seed < _UINT64, f"seed is {seed}, not in [0, 2**64)")
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=asked.max_tokens or 1,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
    )


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


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _float32(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}, not a finite number")
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError as error:
        raise InvalidRequest(f"{name} is {value:g}, too large") from error


def _check_text(name: str, text: str, max_chars: int) -> None:
    _require(len(text) <= max_chars, f"{name} has {len(text)} characters, at most {max_chars}")
    _require(is_unicode(text), f"{name} is not valid Unicode: it has a lone surrogate")


def is_unicode(text: str) -> bool:
    """False for a string with lone surrogates: it has no UTF-8, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidRequest(problem)
