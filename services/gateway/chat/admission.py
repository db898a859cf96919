"""Admits requests: checks the parameters, tokenizes the prompt, resolves every default, and refuses
a request that no pool can ever hold. An admitted request may wait in a model queue.
"""

from collections.abc import Sequence
from dataclasses import replace

from blockstore.records import PoolSpec
from services.gateway.api import GenerationRequest
from services.gateway.chat.prompts import PROMPT, check_token_ids, context_length, tokenize_prompt
from services.gateway.chat.retaining import resolve_retain
from services.gateway.chat.sampling import resolve_sampling
from services.gateway.chat.tools import form_of, parsing_of
from services.gateway.checks import check_text, require
from services.gateway.request.capacity import capacity_problem
from services.gateway.request.request import Request
from services.gateway.workers.directory import ModelPools
from services.protocol.logprobs import MAX_LOGPROBS
from services.protocol.ticket import MAX_SEQUENCES, PRIORITIES, Adapter
from services.runtime.errors import PromptTooLong

MAX_SALT_CHARS = 1024
MAX_LOGPROBS_PER_MESSAGE = 1 << 18
"""Limit for the logprobs of a prompt. One message carries them: they take about 7 MB, and a message
has at most 16 MiB."""


async def admit(
    request: GenerationRequest,
    request_id: str,
    name: str,
    served: ModelPools,
    adapter: Adapter | None = None,
) -> Request:
    """The request of a client that asks for the model `name`: checked, with its prompt tokenized
    and its defaults resolved, but without an output.

    Raises InvalidRequest or PromptTooLong.
    """
    asked = request.sampling
    text = "this model is a cross-encoder, which draws no tokens: use /v1/score or /v1/rerank"
    require(not served.model.config.is_cross_encoder, text, "model")
    check_text("cache_salt", request.cache_salt, MAX_SALT_CHARS)
    check_logprobs("logprobs", asked.logprobs)
    check_logprobs("prompt_logprobs", asked.prompt_logprobs)
    require(1 <= asked.n <= MAX_SEQUENCES, f"n is {asked.n}, not in [1, {MAX_SEQUENCES}]", "n")
    sampling = await resolve_sampling(asked, served.model)
    check_slots(sampling.width, served.max_slots)
    room = max(served.longest_request - (asked.max_tokens or 1), 1)
    prompt = await tokenize_prompt(request, served.model, served.max_model_len, room)
    require(bool(prompt), "the prompt is empty", PROMPT)
    most = served.model.config.generation.max_new_tokens
    max_tokens = resolve_max_tokens(
        len(prompt),
        _at_most(most, asked.max_tokens) if asked.max_tokens else None,
        served.max_model_len,
        served.specs,
        sampling.width,
        default=_at_most(most, asked.default_max_tokens),
    )
    check_logprobs_of_prompt(len(prompt), asked.prompt_logprobs)
    require(
        sampling.min_tokens <= max_tokens,
        f"min_tokens is {sampling.min_tokens}, max_tokens only {max_tokens}",
        "min_tokens",
    )
    check_received(request, max_tokens, sampling.temperature, served.model.config.vocab_size)
    parsing = parsing_of(request, served.model, prompt)
    structure = await form_of(request, parsing, served.model)
    sampling = replace(sampling, max_tokens=max_tokens, structure=structure)
    return Request(
        request,
        request_id,
        name,
        prompt,
        sampling,
        prompt_logprobs=asked.prompt_logprobs,
        parsing=parsing,
        adapter=adapter,
        retain=await resolve_retain(request, prompt, served),
    )


def _at_most(limit: int | None, number: int | None) -> int | None:
    """The smaller one; None stands for no limit."""
    return min((each for each in (limit, number) if each is not None), default=None)


def check_priority(priority: int, *, client_priority: bool, ceiling: int | None = None) -> None:
    """Raises InvalidRequest. `ceiling` is the most urgent priority of the caller's API key; it
    replaces `client_priority`."""
    require(
        ceiling is not None or priority == 0 or client_priority,
        f"priority is {priority}, but this deployment takes no priority from clients; `quire serve "
        "--client-priority`, or QUIRE_GATEWAY_CLIENT_PRIORITY=true, allows it",
        "priority",
    )
    require(
        ceiling is None or priority >= ceiling,
        f"priority is {priority}; this API key may ask for {ceiling} or a higher number, which is "
        "less urgent",
        "priority",
    )
    low, high = PRIORITIES[0], PRIORITIES[-1]
    require(low <= priority <= high, f"priority is {priority}, not in [{low}, {high}]", "priority")


def check_logprobs(name: str, num_top: int | None) -> None:
    require(
        num_top is None or 0 <= num_top <= MAX_LOGPROBS,
        f"{name} is {num_top}, not in [0, {MAX_LOGPROBS}]",
        name,
    )


def check_logprobs_of_prompt(num_tokens: int, num_top: int | None) -> None:
    num_logprobs = 0 if num_top is None else num_tokens * (1 + num_top)
    require(
        num_logprobs <= MAX_LOGPROBS_PER_MESSAGE,
        f"prompt_logprobs {num_top} of {num_tokens} tokens are {num_logprobs} logprobs, at most "
        f"{MAX_LOGPROBS_PER_MESSAGE} at once",
        "prompt_logprobs",
    )


def check_received(
    request: GenerationRequest, max_tokens: int, temperature: float, vocab_size: int
) -> None:
    """Raises InvalidRequest if `received` does not fit the request that it claims to continue."""
    if request.received is None:
        return
    require(
        bool(request.request_id and request.resume_token),
        "received needs the request_id and the resume_token of the stream that broke; the token "
        "came with its first response",
        "received",
    )
    require(
        not temperature or request.sampling.seed is not None,
        "a sampled request can only be continued with its seed",
        "seed",
    )
    num_sequences, num_received = request.sampling.n, len(request.received)
    require(
        num_received <= num_sequences,
        f"{num_received} sequences received; n is {num_sequences}",
        "received",
    )
    indices = [each.index for each in request.received]
    require(
        len(set(indices)) == len(indices) and all(0 <= index < num_sequences for index in indices),
        f"received is of sequences {indices}; n is {num_sequences}",
        "received",
    )
    num_ended = sum(each.finish_reason is not None for each in request.received)
    require(num_ended < num_sequences, "all sequences have been received to their end", "received")
    for each in request.received:
        num_received = len(each.token_ids)
        require(
            request.sampling.beam is None or each.finish_reason is not None,
            "a beam search sends whole sequences, but a received one has not ended",
            "received",
        )
        require(
            num_received < max_tokens + (each.finish_reason is not None),
            f"{num_received} tokens received, max_tokens is {max_tokens}",
            "received",
        )
        check_token_ids("received", each.token_ids, vocab_size)


def check_slots(width: int, max_slots: int | None) -> None:
    """Raises InvalidRequest if no decode worker can run `width` sequences at the same time.

    `max_slots` is the largest number of decode slots of a decode worker; None if there is none now.
    """
    require(
        max_slots is None or width <= max_slots,
        f"{width} sequences; the decode workers run at most {max_slots} at a time",
        "n",
    )


def resolve_max_tokens(
    num_prompt: int,
    asked: int | None,
    max_model_len: int,
    specs: Sequence[PoolSpec],
    num_sequences: int,
    *,
    default: int | None = None,
) -> int:
    """The limit of generated tokens for each sequence.

    `asked` if it fits. If `asked` is None: all that the context and the largest pool leave, at most
    `default`.

    PromptTooLong: the prompt and the limit do not fit the context, or no pool can hold them.
    """
    if num_prompt + 1 > max_model_len:
        raise PromptTooLong(
            f"{context_length(max_model_len)} However, the prompt has {num_prompt} tokens, which "
            "leave none to generate",
            PROMPT,
        )
    if asked is not None and num_prompt + asked > max_model_len:
        raise PromptTooLong(
            f"{context_length(max_model_len)} However, you requested {num_prompt + asked} tokens: "
            f"the prompt's {num_prompt} and max_tokens {asked}",
            "max_tokens",
        )
    pool = max(specs, key=lambda spec: spec.num_blocks * spec.block_size)
    num_shared = num_prompt // pool.block_size
    num_own = (pool.num_blocks - num_shared) // num_sequences
    room = (num_shared + num_own) * pool.block_size - num_prompt
    left = min(max_model_len - num_prompt, max(room, 1))
    max_tokens = asked or (left if default is None else min(left, default))
    if problem := capacity_problem(num_prompt, max_tokens, pool, num_sequences):
        text = f"{context_length(max_model_len)} However, {problem}"
        raise PromptTooLong(text, PROMPT if asked is None else "max_tokens")
    return max_tokens
