"""Bad words to token sequences: those that a text would spell each word with, at its start and
behind a space."""

import asyncio
from collections.abc import Iterator, Sequence

from services.gateway.intake.catalog import Model
from services.gateway.intake.checks import require

MAX_CHARS = 16_384
"""Of all words of a request."""

_FEW_CHARS = 512
"""Up to here tokenizing takes less than passing it to a thread and back."""


async def token_sequences(words: Sequence[str], model: Model) -> tuple[tuple[int, ...], ...]:
    """Each sequence once. InvalidRequest: a word has no tokens of the model's."""
    if sum(map(len, words)) <= _FEW_CHARS:
        return _token_sequences(words, model)
    return await asyncio.to_thread(_token_sequences, words, model)


def _token_sequences(words: Sequence[str], model: Model) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(ids for word in words for ids in _spellings(word, model)))


def _spellings(word: str, model: Model) -> Iterator[tuple[int, ...]]:
    """As vLLM has it, the one behind a space only where that makes another token of as many: not
    where the space is a token of its own, so that the word itself comes next."""
    word = word.lstrip()
    plain = _encode(word, model)
    require(bool(plain), f"the bad word {word!r} has no tokens")
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
    )
    return token_ids
