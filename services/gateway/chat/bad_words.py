"""Turns each bad word into the token sequences that spell it: at the start of a text, and after a
space."""

import asyncio
from collections.abc import Iterator, Sequence

from services.gateway.checks import require
from services.gateway.workers.models.catalog import Model

MAX_CHARS = 16_384
"""Limit for all bad words of a request together."""

_FEW_CHARS = 512
"""Up to this length, tokenizing takes less time than a change to a thread and back."""


async def token_sequences(words: Sequence[str], model: Model) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell `words`, without duplicates.

    Raises InvalidRequest if a word has no tokens, or a token outside the model's vocabulary.
    """
    if sum(map(len, words)) <= _FEW_CHARS:
        return _token_sequences(words, model)
    return await asyncio.to_thread(_token_sequences, words, model)


def _token_sequences(words: Sequence[str], model: Model) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(ids for word in words for ids in _spellings(word, model)))


def _spellings(word: str, model: Model) -> Iterator[tuple[int, ...]]:
    """The word's tokens at the start of a text, and perhaps those after a space, as in vLLM.

    The second sequence counts only if it is as long as the first and starts with another token. So
    it is left out where the space is a token of its own and the word's tokens follow unchanged.
    """
    word = word.lstrip()
    plain = _encode(word, model)
    require(bool(plain), f"the bad word {word!r} has no tokens", "bad_words")
    yield plain
    spaced = _encode(" " + word, model)
    if len(spaced) == len(plain) and spaced[0] != plain[0]:
        yield spaced


def _encode(text: str, model: Model) -> tuple[int, ...]:
    token_ids = model.tokenizer.encode(text, add_special_tokens=False)
    vocab_size = model.config.vocab_size
    require(
        max(token_ids, default=0) < vocab_size,
        f"bad_words: {text!r} has a token beyond the model's vocabulary of {vocab_size}",
        "bad_words",
    )
    return token_ids
