"""Decodes request bodies that are compressed with gzip."""

import zlib

from starlette.exceptions import HTTPException

from services.runtime.errors import InvalidRequest

_GZIP = zlib.MAX_WBITS | 16
_NO_ENCODING = {"", "identity"}


class BodyDecoder:
    """Decodes a body, part after part. `encoding` is the value of `Content-Encoding`. Raises
    HTTPException 415 for one that is not served."""

    def __init__(self, encoding: str) -> None:
        self._inflating = None
        self._has_begun = False
        encoding = encoding.strip().lower()
        if encoding in ("gzip", "x-gzip"):
            self._inflating = zlib.decompressobj(_GZIP)
        elif encoding not in _NO_ENCODING:
            raise HTTPException(
                415, f"Content-Encoding is {encoding!r}; bodies may have gzip, or no encoding"
            )

    def decode(self, content: bytes, most: int, *, is_last: bool) -> bytes:
        """The next part. At most `most` bytes of it are decoded, and one more if there is more.
        Raises InvalidRequest."""
        if self._inflating is None or not (content or self._has_begun):
            return content
        self._has_begun = True
        try:
            decoded = self._inflating.decompress(content, most + 1)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not valid gzip: {error}") from error
        if len(decoded) <= most and (
            self._inflating.unused_data or (is_last and not self._inflating.eof)
        ):
            raise InvalidRequest("the body is not valid gzip: it is cut off, or has more behind it")
        return decoded
