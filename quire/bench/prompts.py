"""Random prompts: text or token ids of a wanted length. The same seed gives the same ones."""

import random
from collections.abc import Sequence
from pathlib import Path

_FIRST_ORDINARY_TOKEN = 300
"""Byte and special tokens come before, in most vocabularies."""

_COMMON = (
    "the of and to in is that for it as with was on be by at this are from or have an they which "
    "one you had her all she there would their we him been has when who will more no if out so "
    "said what up its about into than them can only other new some could time these two may then "
    "do first any my now such like our over man me even most made after also did many before must "
    "through back years where much your way well down should because each just those people how"
)
COMMON_WORDS = tuple(f" {word}" for word in _COMMON.split())
"""Words that are one token each, with the space before them, in most vocabularies. What the server
counts (`usage`) is what the figures use."""


class Prompts:
    """Draws prompts of `words`; if that is None, prompts are ids below `vocab_size`."""

    def __init__(self, seed: int, words: Sequence[str] | None, vocab_size: int = 1000) -> None:
        self._draw = random.Random(seed)
        self._words = words
        self._ids = range(_FIRST_ORDINARY_TOKEN, vocab_size)

    def draw(self, length: int) -> "str | list[int]":
        if self._words is None:
            return self._draw.choices(self._ids, k=length)
        return "".join(self._draw.choices(self._words, k=length))

    def between(self, low: int, high: int) -> int:
        """Draw a length."""
        return self._draw.randint(low, high)


def joined(parts: Sequence["str | list[int]"]) -> "str | list[int]":
    """One prompt of parts that are all text, or all ids."""
    if isinstance(parts[0], str):
        return "".join(part for part in parts if isinstance(part, str))
    return [token for part in parts for token in part if isinstance(token, int)]


def single_token_words(tokenizer_file: Path) -> list[str]:
    """Words with a space before them that are one token each, wherever they stand: text of n of
    them has n tokens, since pre-tokenizers cut before the space.

    Raises ValueError if the tokenizer has no such words, or if the file is no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{tokenizer_file} is no tokenizer.json: {error}") from error
    decoded = (tokenizer.decode([id_]) for id_ in range(tokenizer.get_vocab_size()))
    words = [
        text for text in decoded if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()
    ]
    encoded = tokenizer.encode_batch(words, add_special_tokens=False)
    single = [word for word, encoding in zip(words, encoded, strict=True) if len(encoding.ids) == 1]
    if not single:
        raise ValueError(f"{tokenizer_file}: no word is one token")
    return single
