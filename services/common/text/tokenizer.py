"""A checkpoint's tokenizer: text to token ids, and the tables that token ids become text by."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from services.common.errors import StartupError
from services.common.text.detokenizer import Detokenizer
from services.common.text.pieces import Pieces, check_decoder, pieces_of, special_token_ids
from services.common.text.special_tokens import SpecialTokens, encoding_of

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class Tokenizer:
    """Safe to use from several threads; `encode` works without the interpreter's lock.

    `special_tokens`: text by role, as chat templates call them (`bos_token`, `eos_token` ...).
    """

    _tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """StartupError: tokenizer.json is missing, broken, or of a kind that cannot be streamed."""
        tokenizer = cls(read_tokenizer(directory), special_tokens(directory))
        _ = tokenizer.pieces, tokenizer.special  # computed now, not at the first request
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included. A model's may be larger: padding."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def pieces(self) -> Pieces:
        """Special tokens are no text."""
        return self.all_pieces.without(special_token_ids(self._tokenizer))

    @cached_property
    def special(self) -> SpecialTokens:
        return SpecialTokens(self._tokenizer)

    @cached_property
    def all_pieces(self) -> Pieces:
        return pieces_of(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """In bytes of its text: no token stands for more characters."""
        return max((len(piece) for piece in self.all_pieces.following if piece), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`. A rendered chat has its special tokens already: False there.

        InvalidRequest: the text holds lone surrogates.
        """
        encoding = encoding_of(self._tokenizer, text, add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_chat(self, text: str, hidden: Mapping[str, str]) -> tuple[int, ...]:
        """Token ids of a rendered chat, with what `special.hide` has hidden in its messages.

        InvalidRequest.
        """
        if hidden:
            return self.special.encode(text, hidden)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; to stream one, see `detokenizer`."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token; None where there is none."""
        return self._tokenizer.token_to_id(token)

    def spell(self, token_id: int) -> bytes:
        """What a token stands for: UTF-8, or part of a character; of one that is no text, its name,
        and nothing where it has none."""
        pieces = self.pieces.following
        piece = pieces[token_id] if token_id < len(pieces) else None
        if piece is None:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        return piece

    def detokenizer(
        self, *, starts_text: bool = False, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A new stream of text; it goes on after a prompt unless it `starts_text` itself."""
        pieces = self.pieces if skip_special_tokens else self.all_pieces
        return Detokenizer(pieces, starts_text=starts_text)


def tokenizer_file(directory: Path) -> Path:
    """StartupError: there is none."""
    path = directory / TOKENIZER_FILE
    if path.is_file():
        return path
    hint = ""
    for other in ("tokenizer.model", "vocab.json"):
        if (directory / other).is_file():
            hint = (
                f"; {other} is not read, but transformers makes the file from it: "
                f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained(...)"
            )
            break
    raise StartupError(f"no tokenizer: {path} does not exist{hint}")


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """StartupError: see `Tokenizer.from_directory`."""
    path = tokenizer_file(directory)
    try:
        tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for whatever it cannot read
        raise StartupError(f"cannot read {path}: {error}") from error
    check_decoder(tokenizer)
    return tokenizer


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty where there is none. StartupError: it is no JSON object."""
    path = directory / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"cannot read {path}: not a JSON object")
    return config


def special_tokens(directory: Path) -> dict[str, str]:
    """Text by role. A token is written as its text, or as an object that has it under `content`.
    StartupError: tokenizer_config.json is no JSON object."""
    config = read_tokenizer_config(directory)
    found: dict[str, str] = {}
    for role in _SPECIAL_TOKENS:
        token = config.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[f"{role}_token"] = text
    return found
