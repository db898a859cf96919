"""Computes the bytes of each token id, once, from a tokenizer's vocabulary and decoder.

With these tables a token becomes text in constant time, and a character that spans several tokens
is a sequence of bytes that is not complete yet. This module knows the decoders of the supported
model families. Any other decoder is refused at start, because its text could not be streamed
exactly.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from services.runtime.errors import StartupError

Piece = bytes | None
"""The UTF-8 bytes of a token, which may be part of a character. None if the id has no text, because
it has no token, or a special token that is not shown."""

_MAX_IDS = 1 << 22
"""The tables have an entry for each id, also for those without a token."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of all tokens, by token id."""

    following: Sequence[Piece]
    """The piece of a token inside of a text."""
    first: Sequence[Piece]
    """The piece of a token at the start of a text."""
    num_stripped: int = 0
    """The most spaces that are removed from the start of a text."""

    def without(self, token_ids: Collection[int]) -> "Pieces":
        """The same pieces, but without text for these tokens."""
        following = _without(self.following, token_ids)
        same = self.first is self.following
        return replace(
            self, following=following, first=following if same else _without(self.first, token_ids)
        )


def _without(pieces: Sequence[Piece], token_ids: Collection[int]) -> Sequence[Piece]:
    left = list(pieces)
    for token_id in token_ids:
        left[token_id] = None
    return left


def pieces_of(tokenizer: tokenizers.Tokenizer) -> Pieces:
    """The pieces of a tokenizer, with special tokens as text. Raises StartupError if this module
    does not know the tokenizer's decoder."""
    return _pieces(_texts(tokenizer), _decoder_steps(tokenizer))


def check_decoder(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises StartupError if `pieces_of` would, without computing the pieces."""
    _pieces([], _decoder_steps(tokenizer))


def _pieces(tokens: list[str | None], steps: list[dict[str, Any]]) -> Pieces:
    if not steps:
        return _of_words(tokens)
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return _same_everywhere(tokens, _byte_level)
        case ["Metaspace"]:
            return _of_metaspace(tokens, steps[0])
    return _of_sequence(tokens, steps)


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())  # without the vocabulary's megabytes
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def special_token_ids(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The ids of special tokens, which are not shown unless a request asks for them."""
    added = tokenizer.get_added_tokens_decoder()
    return tuple(token_id for token_id, token in added.items() if token.special)


def _texts(tokenizer: tokenizers.Tokenizer) -> list[str | None]:
    """The token of each id; None for ids without a token."""
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    if (size := max(by_id, default=-1) + 1) > _MAX_IDS:
        raise StartupError(f"the tokenizer has a token id of {size - 1}, at most {_MAX_IDS - 1}")
    return [by_id.get(token_id) for token_id in range(size)]


def _same_everywhere(
    tokens: list[str | None], piece_of: Callable[[str], bytes], num_stripped: int = 0
) -> Pieces:
    pieces = [None if token is None else piece_of(token) for token in tokens]
    return Pieces(pieces, pieces, num_stripped)


def _of_words(tokens: list[str | None]) -> Pieces:
    """Pieces of a tokenizer without a decoder, which joins tokens with spaces."""
    first = [None if token is None else token.encode() for token in tokens]
    return Pieces([None if piece is None else b" " + piece for piece in first], first)


def _of_metaspace(tokens: list[str | None], step: dict[str, Any]) -> Pieces:
    """Pieces of a Metaspace decoder: a mark stands for a space; in the first token it stands for
    nothing, unless the tokenizer never prepends a mark."""
    mark = step["replacement"]
    following = [None if t is None else t.replace(mark, " ").encode() for t in tokens]
    if step.get("prepend_scheme") == "never":
        return Pieces(following, following)
    return Pieces(following, [None if t is None else t.replace(mark, "").encode() for t in tokens])


def _of_sequence(tokens: list[str | None], steps: list[dict[str, Any]]) -> Pieces:
    """Pieces of SentencePiece's decoder: replace the mark, turn tokens like `<0x0A>` into bytes,
    join, strip spaces at the start."""
    replacements: list[tuple[str, str]] = []
    byte_fallback, num_stripped = False, 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": mark}, "content": text}:
                replacements.append((mark, text))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                num_stripped = start
            case _:
                raise StartupError(f"a tokenizer with decoder {step} cannot be streamed")

    def piece_of(token: str) -> bytes:
        for mark, text in replacements:
            token = token.replace(mark, text)
        byte = _fallback_byte(token) if byte_fallback else None
        return token.encode() if byte is None else byte

    return _same_everywhere(tokens, piece_of, num_stripped)


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def _byte_level(token: str) -> bytes:
    """The bytes of a byte-level token. A token with a character outside of the alphabet is an added
    token, whose bytes are its own text."""
    try:
        return bytes(_BYTES[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from characters to bytes: a printable Latin-1 byte is its own character, the
    other bytes have the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
