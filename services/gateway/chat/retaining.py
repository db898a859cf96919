"""Checks what a request wants to retain, and finds how many tokens of its prompt that is."""

from contextlib import suppress
from dataclasses import replace

from services.gateway.api import ChatMessage, GenerationRequest, RetainDirective
from services.gateway.chat.prompts import tokenize_prompt
from services.gateway.checks import check_text, require
from services.gateway.workers.directory import ModelPools
from services.protocol.block_keys import common_prefix
from services.runtime.errors import InvalidRequest

MAX_DIRECTIVES = 4
"""Limit for the prefixes of one request, as in Anthropic's API."""
MAX_NAME_CHARS = 128
MAX_TTL_S = 7 * 24 * 3600


async def resolve_retain(
    request: GenerationRequest, prompt: tuple[int, ...], served: ModelPools
) -> tuple[RetainDirective, ...]:
    """The directives with the number of tokens of each. Raises InvalidRequest."""
    asked = request.retain
    require(
        len(asked) <= MAX_DIRECTIVES,
        f"{len(asked)} prefixes to retain, at most {MAX_DIRECTIVES}",
        "cache_control",
    )
    return tuple([await _resolved(each, request, prompt, served) for each in asked])


async def _resolved(
    asked: RetainDirective, request: GenerationRequest, prompt: tuple[int, ...], served: ModelPools
) -> RetainDirective:
    check_text("prompt_cache_key", asked.name, MAX_NAME_CHARS)
    require(1 <= asked.ttl_s <= MAX_TTL_S, f"ttl is {asked.ttl_s} s, not in [1, {MAX_TTL_S}]")
    if asked.until is None:
        return replace(asked, num_tokens=len(prompt))
    # Some templates refuse a chat without a message of the user, and nobody takes an empty one.
    for shorter in filter(None, (asked.until, (*asked.until, ChatMessage("user", "")))):
        with suppress(InvalidRequest):
            prefix = replace(request, prompt=shorter, add_generation_prompt=False, truncation=None)
            tokens = await tokenize_prompt(prefix, served.model, served.max_model_len)
            return replace(asked, num_tokens=len(common_prefix([prompt, tokens])))
    return replace(asked, num_tokens=0)
