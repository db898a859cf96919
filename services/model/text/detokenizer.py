"""Turns token ids into text as they arrive, without splitting characters."""

import codecs
from collections.abc import Iterable

from services.model.text.pieces import Pieces


class Detokenizer:
    """Decodes one sequence, in constant time per token.

    All deltas together equal the text of decoding all ids at once; an invalid byte becomes U+FFFD.
    There is one exception: in a run of byte-fallback tokens that is not valid UTF-8, `tokenizers`
    replaces every byte, even of characters that the client already has; this class replaces only
    the invalid bytes.
    """

    def __init__(self, pieces: Pieces, *, starts_text: bool = False) -> None:
        self._following = pieces.following
        self._next = pieces.first if starts_text else pieces.following
        self._num_to_strip = pieces.num_stripped if starts_text else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. Bytes of an incomplete character are held back."""
        data = b"".join(self._piece(token_id) for token_id in token_ids)
        return self._stripped(self._utf8.decode(data))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character was not completed."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _piece(self, token_id: int) -> bytes:
        pieces = self._next
        piece = pieces[token_id] if token_id < len(pieces) else None
        if piece is None:
            return b""
        self._next = self._following
        return piece

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text
