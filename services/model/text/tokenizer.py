"""A checkpoint's tokenizer: encodes text to token ids, and makes detokenizers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers

from quire.files import read_small_file
from services.model.gguf.file import GgufFile, gguf_file
from services.model.gguf.tokenizer import gguf_tokenizer
from services.model.text.added_tokens import add_tokens, check_added_tokens, special_tokens
from services.model.text.detokenizer import Detokenizer
from services.model.text.pieces import Pieces, check_decoder, pieces_of, special_token_ids
from services.model.text.special_tokens import SpecialTokens, encoding_of
from services.runtime.errors import StartupError

TOKENIZER_FILE = "tokenizer.json"

_MAX_TOKENIZER_BYTES = 64 << 20
"""Twice as large as the largest published ones (33 MB)."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, which threads may share. `encode` releases the interpreter lock."""

    _tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """The text of each role, as in chat templates (`bos_token`, `eos_token` ...)."""

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Read a checkpoint's tokenizer. Raises StartupError if tokenizer.json is missing or
        invalid, or its decoder cannot be streamed."""
        tokenizer = cls(read_tokenizer(directory), special_tokens(directory))
        _ = tokenizer.pieces, tokenizer.special  # compute them now, not at the first request
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids, with added tokens. A model's vocabulary may be larger, by
        padding."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def pieces(self) -> Pieces:
        """The bytes of each token; special tokens have none."""
        return self.pieces_with(frozenset())

    def pieces_with(self, shown: Collection[str]) -> Pieces:
        """The same, but special tokens with one of these texts have it as bytes."""
        hidden = special_token_ids(self._tokenizer)
        return self.all_pieces.without([i for i in hidden if self.token(i) not in shown])

    @cached_property
    def special(self) -> SpecialTokens:
        return SpecialTokens(self._tokenizer)

    @cached_property
    def all_pieces(self) -> Pieces:
        """The bytes of each token, special tokens included."""
        return pieces_of(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """The bytes of the longest token, so that no token has more characters than this."""
        return max((len(piece) for piece in self.all_pieces.following if piece), default=1)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        cut: tuple[int, str] | None = None,
        query: str | None = None,
    ) -> tuple[int, ...]:
        """The token ids of `text`. `add_special_tokens` is False for a rendered chat, which has its
        special tokens already. `cut` is the most tokens, and the side (left or right) at which
        tokens of the text are left out, but no special ones. `query` is the text before it, if the
        tokenizer's template for pairs joins both.

        Raises InvalidRequest if the text contains a lone surrogate.
        """
        if cut is None and query is None:
            encoding = encoding_of(self._tokenizer, text, add_special_tokens=add_special_tokens)
            return tuple(encoding.ids)
        pair = [encoding_of(self._tokenizer, each) for each in (query, text) if each is not None]
        if cut is not None:
            most = cut[0] - sum(len(each) for each in pair[:-1])
            if add_special_tokens:
                most -= self._tokenizer.num_special_tokens_to_add(is_pair=query is not None)
            pair[-1].truncate(max(most, 0), direction=cut[1])
        second = None if query is None else pair[1]
        return tuple(self._tokenizer.post_process(pair[0], second, add_special_tokens).ids)

    def encode_chat(self, text: str, hidden: Mapping[str, str]) -> tuple[int, ...]:
        """The token ids of a rendered chat. `hidden` is the text that `special.hide` has hidden in
        its messages. Raises InvalidRequest."""
        if hidden:
            return self.special.encode(text, hidden)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. To stream a sequence, use `detokenizer`."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str:
        """The token of an id, as the vocabulary spells it; "" for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, which may be part of a character. A special token has its
        name instead; an id without a token has no bytes."""
        pieces = self.pieces.following
        piece = pieces[token_id] if token_id < len(pieces) else None
        if piece is None:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        return piece

    def detokenizer(
        self, *, starts_text: bool = False, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A new detokenizer. Its tokens start a text if `starts_text`, or else continue a
        prompt."""
        pieces = self.pieces if skip_special_tokens else self.all_pieces
        return Detokenizer(pieces, starts_text=starts_text)


def has_tokenizer(directory: Path) -> bool:
    return gguf_file(directory) is not None or (directory / TOKENIZER_FILE).is_file()


def tokenizer_file(directory: Path) -> Path:
    """The path of tokenizer.json, or of the GGUF file that has the tokenizer. Raises StartupError
    if there is no such file."""
    if (gguf := gguf_file(directory)) is not None:
        return gguf
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
    """Read tokenizer.json, or the tokenizer in a GGUF file, and check its decoder. Raises
    StartupError as `Tokenizer.from_directory` does."""
    if (gguf := gguf_file(directory)) is not None:
        tokenizer = gguf_tokenizer(GgufFile.read(gguf))
        check_added_tokens(tokenizer, gguf)
        return tokenizer
    path = tokenizer_file(directory)
    try:
        content = read_small_file(path, _MAX_TOKENIZER_BYTES)
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # tokenizers raises a plain Exception for any unreadable file
        raise StartupError(f"cannot read {path}: {error}") from error
    check_decoder(tokenizer)
    add_tokens(tokenizer, directory)
    check_added_tokens(tokenizer, path)
    return tokenizer
