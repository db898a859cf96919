"""Prompts to token ids. Work that grows with the prompt is done in threads, and bounded: a text is
refused after a look at as much of it as fills the context, not after all of it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from services.common.errors import InvalidRequest, PromptTooLong
from services.gateway.api import ChatMessage, Prompt
from services.gateway.catalog import Model

_SHORT_CHARS = 2048
"""Up to here tokenizing takes less than passing it to a thread and back."""

MAX_MESSAGES = 16_384
"""Of a chat; rendering takes some 20 us for each."""

_FIRST_LOOK_CHARS = 1 << 17
_NUM_THREADS = 2

_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")


async def token_ids_of(prompt: Prompt, model: Model, max_model_len: int) -> tuple[int, ...]:
    """At least one token, each in the vocabulary. InvalidRequest, PromptTooLong."""
    if _num_chars(prompt) <= _SHORT_CHARS:
        token_ids = _token_ids(prompt, model, max_model_len)
    else:
        loop = asyncio.get_running_loop()
        token_ids = await loop.run_in_executor(_threads, _token_ids, prompt, model, max_model_len)
    if not token_ids:
        raise InvalidRequest("the prompt is empty")
    return token_ids


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """InvalidRequest names the first that is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}: {token_id} is not in the vocabulary of {vocab_size}")


def _num_chars(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(
        len(part.role) + len(part.content) if isinstance(part, ChatMessage) else 1
        for part in prompt
    )


def _token_ids(prompt: Prompt, model: Model, max_model_len: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encode(prompt, model, max_model_len, add_special_tokens=True) if prompt else ()
    messages = [part for part in prompt if isinstance(part, ChatMessage)]
    if messages:
        # The template puts special tokens where they belong.
        text = _render(messages, model)
        return _encode(text, model, max_model_len, add_special_tokens=False)
    token_ids = tuple(part for part in prompt if not isinstance(part, ChatMessage))
    if len(token_ids) >= max_model_len:
        raise _too_long(str(len(token_ids)), max_model_len)
    check_token_ids("prompt", token_ids, model.config.vocab_size)
    return token_ids


def _render(messages: Sequence[ChatMessage], model: Model) -> str:
    if model.chat_template is None:
        raise InvalidRequest("this model has no chat template; send text or token ids")
    for number, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"message {number} has no role")
    return model.chat_template.render(
        [{"role": message.role, "content": message.content} for message in messages]
    )


def _encode(
    text: str, model: Model, max_model_len: int, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Tokenize, looking at twice as much of a long text each time while it may still fit.

    Cutting a text changes its tokens near the cut only; a tenth more than fits is surely too much.
    """
    surely_too_many = max_model_len + max_model_len // 10 + 64
    look = _FIRST_LOOK_CHARS
    while look < len(text):
        num_seen = len(model.tokenizer.encode(text[:look], add_special_tokens=False))
        if num_seen > surely_too_many:
            raise _too_long(f"more than {max_model_len}", max_model_len)
        look *= 2
    token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if token_ids and max(token_ids) >= model.config.vocab_size:
        raise InvalidRequest(
            f"the prompt has token {max(token_ids)}, and the model's vocabulary only "
            f"{model.config.vocab_size}"
        )
    return token_ids


def _too_long(num_tokens: str, max_model_len: int) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt has {num_tokens} tokens; the model's context of {max_model_len} leaves room "
        "for none to generate"
    )
