"""Turns prompts into token ids.

Long prompts are tokenized in threads. The work is bounded: a text that does not fit the context is
refused after the part that fills the context, not after all of it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from pydantic_core import to_json

from services.gateway.api import (
    ChatMessage,
    Prompt,
    PromptRequest,
    RequestedTools,
    ToolChoice,
    Truncation,
)
from services.gateway.chat.conversations import fitted
from services.gateway.workers.models.catalog import Model
from services.runtime.errors import InvalidRequest, PromptTooLong

_SHORT_CHARS = 2048
"""Up to this length, tokenizing takes less time than a change to a thread and back."""

PROMPT = "prompt"
"""The name in errors of whatever field has the prompt; the HTTP server names its own."""

MAX_MESSAGES = 16_384
"""Limit for the messages of a chat; to render a message takes about 20 us."""

_TEMPLATE_KEYS = (
    *("messages", "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"),
    *("tools", "id", "type", "function", "description", "parameters", "arguments", "thinking"),
)
"""The keys of messages and tools that a template names. Other keys are text of the client."""

_FIRST_LOOK_CHARS = 1 << 17
_NUM_THREADS = 2

_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")


async def tokenize_prompt(
    asked: PromptRequest,
    model: Model,
    max_model_len: int,
    most: int | None = None,
    query: str | None = None,
) -> tuple[int, ...]:
    """The token ids of a request's prompt, behind those of `query`, all in the vocabulary. An empty
    text has what the tokenizer adds to every text, such as BOS, or none. A truncated prompt has at
    most `most` tokens, or with None `max_model_len`.

    Raises InvalidRequest or PromptTooLong.
    """
    num_query_chars = len(query or "")
    if num_query_chars > max_model_len * model.tokenizer.longest_token:
        raise prompt_too_long(f"more than {max_model_len}", max_model_len)
    truncation = resolved(asked.truncation, most or max_model_len)
    work = partial(_token_ids, asked, model, max_model_len, truncation, query)
    has_variables = asked.template_arguments or asked.tools is not None
    if _num_chars(asked.prompt) + num_query_chars <= _SHORT_CHARS and not has_variables:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def resolved(asked: Truncation | None, most: int) -> Truncation | None:
    """The truncation with its number of tokens, at most `most`. Raises InvalidRequest."""
    if asked is None:
        return None
    number = most if asked.num_tokens == -1 else asked.num_tokens
    if not 0 < number <= most:
        name = "truncate_prompt_tokens"
        text = f"{name} is {asked.num_tokens}, not -1 or in [1, {most}]"
        raise InvalidRequest(f"{text}, the tokens that a prompt of this request may have", name)
    return asked._replace(num_tokens=number)


def _cut(token_ids: tuple[int, ...], truncation: Truncation | None) -> tuple[int, ...]:
    if truncation is None:
        return token_ids
    number = truncation.num_tokens
    return token_ids[-number:] if truncation.side == "left" else token_ids[:number]


def _shown(tools: RequestedTools | None, model: Model) -> Sequence[Mapping[str, Any]]:
    """The tools that the chat template gets. A template without a place for them gets none if they
    may not be called."""
    if tools is None:
        return ()
    template = model.chat_template
    has_place = template is None or template.takes_tools
    return () if tools.choice is ToolChoice.NONE and not has_place else tools.definitions


def check_num_messages(number: int) -> None:
    """Raises InvalidRequest if a chat has too many messages."""
    if number > MAX_MESSAGES:
        raise InvalidRequest(f"{number} messages, at most {MAX_MESSAGES}", PROMPT)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest, with the token id, if one is outside the vocabulary."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}: {token_id} is not in the vocabulary of {vocab_size}", name
            )


def _num_chars(prompt: Prompt) -> int:
    if messages := _messages(prompt):
        return sum(_num_message_chars(message) for message in messages)
    return len(prompt)


def _num_message_chars(message: ChatMessage) -> int:
    fields = to_json(message.fields) if message.fields else b""
    return len(message.role) + len(message.content) + len(fields)


def _messages(prompt: Prompt) -> tuple[ChatMessage, ...]:
    """The messages of a chat; none for any other prompt."""
    is_chat = bool(prompt) and isinstance(prompt[0], ChatMessage)
    return cast("tuple[ChatMessage, ...]", prompt) if is_chat else ()


def _token_ids(
    asked: PromptRequest,
    model: Model,
    max_model_len: int,
    truncation: Truncation | None,
    query: str | None,
) -> tuple[int, ...]:
    if isinstance(asked.prompt, str):
        encode = partial(
            model.tokenizer.encode,
            add_special_tokens=asked.add_special_tokens,
            cut=truncation,
            query=query,
        )
        return _encode(asked.prompt, model, max_model_len, encode, truncation)
    if messages := _messages(asked.prompt):
        is_long = _num_chars(messages) > max_model_len * model.tokenizer.longest_token
        if is_long and truncation is None:
            raise prompt_too_long(f"more than {max_model_len}", max_model_len)
        text, hidden = _render(messages, model, asked)
        encode = partial(model.tokenizer.encode_chat, hidden=hidden)
        return _encode(text, model, max_model_len, encode, truncation)
    token_ids = _cut(cast("tuple[int, ...]", asked.prompt), truncation)
    if len(token_ids) > max_model_len:  # before each is checked
        raise prompt_too_long(str(len(token_ids)), max_model_len)
    check_token_ids("prompt", token_ids, model.config.vocab_size)
    return token_ids


def _render(
    messages: Sequence[ChatMessage], model: Model, asked: PromptRequest
) -> tuple[str, Mapping[str, str]]:
    """The rendered chat, and the special tokens that were hidden in it (`SpecialTokens.hide`).

    Only the template may place special tokens. Those that the client wrote are hidden, so that they
    stay text.
    """
    if model.chat_template is None or model.template_traits is None:
        raise InvalidRequest("this model has no chat template; send text or token ids", PROMPT)
    for number, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"message {number} has no role", PROMPT)
    tools = _shown(asked.tools, model)
    if tools and not model.chat_template.takes_tools:
        raise InvalidRequest("this model's chat template has no place for tools", "tools")
    written = {
        "messages": fitted(messages, model.template_traits),
        "arguments": asked.template_arguments,
        "tools": tools,
    }
    variables = filter(str.isidentifier, asked.template_arguments)
    given, hidden = model.tokenizer.special.hide(written, {*_TEMPLATE_KEYS, *variables})
    text = model.chat_template.render(
        given["messages"],
        add_generation_prompt=asked.add_generation_prompt,
        arguments=given["arguments"],
        tools=given["tools"],
    )
    return text, hidden


def _encode(
    text: str,
    model: Model,
    max_model_len: int,
    encode: Callable[[str], tuple[int, ...]],
    truncation: Truncation | None,
) -> tuple[int, ...]:
    """Tokenizes `text`; tokenizes prefixes of a long text first, each twice as long as the last, or
    suffixes if the truncation leaves out the left side.

    Cutting a text changes its tokens near the cut only. So a prefix with more tokens than 1.1 times
    the context, plus 64, proves that the whole text does not fit, and has all tokens that are left
    of a truncated text.
    """
    surely_too_many = max_model_len + max_model_len // 10 + 64
    is_left = truncation and truncation.side == "left"
    look = _FIRST_LOOK_CHARS
    while look < len(text):
        part = text[-look:] if is_left else text[:look]
        if len(model.tokenizer.encode(part, add_special_tokens=False)) > surely_too_many:
            if truncation is None:
                raise prompt_too_long(f"more than {max_model_len}", max_model_len)
            text = part
            break
        look *= 2
    token_ids = _cut(encode(text), truncation)
    if token_ids and max(token_ids) >= model.config.vocab_size:
        raise InvalidRequest(
            f"the prompt has token {max(token_ids)}, and the model's vocabulary only "
            f"{model.config.vocab_size}",
            PROMPT,
        )
    return token_ids


def prompt_too_long(num_tokens: str, max_model_len: int) -> PromptTooLong:
    return PromptTooLong(
        f"{context_length(max_model_len)} However, the prompt has {num_tokens} tokens", PROMPT
    )


def context_length(num_tokens: int) -> str:
    """The sentence by which OpenAI's clients recognize that a request is too long."""
    return f"This model's maximum context length is {num_tokens} tokens."
