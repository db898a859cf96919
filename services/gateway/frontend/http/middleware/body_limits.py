"""Bounds the memory that request bodies take: each body, and all that are being received."""

import asyncio
import ctypes
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Overloaded
from services.common.rpc.transport import MAX_MESSAGE_BYTES
from services.gateway.frontend.http.middleware.content_encoding import BodyDecoder

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
DEFAULT_BODY_MEMORY_BYTES = 256 * 1024 * 1024
_SMALL_BODY_BYTES = 64 * 1024
"""This much of a body is always accepted, so that large bodies do not keep small ones out."""
_TRIM_BYTES = 32 * 1024 * 1024
"""Freed memory is returned to the kernel if bodies took more than this."""
_RETRY_DELAY_S = 1.0


class BodyLimits:
    """Middleware: `receive` raises HTTPException 413 for a body of more than MAX_BODY_BYTES, and
    Overloaded if all bodies together would take more than `max_memory_bytes`. Bodies arrive decoded
    (`BodyDecoder`), and count with their decoded size.

    A body counts from its first byte until the application calls `receive` for the message after
    the body, or returns. The application makes that call after it has parsed the body.
    """

    def __init__(self, app: ASGIApp, max_memory_bytes: int) -> None:
        self._app = app
        self._max_memory_bytes = max_memory_bytes
        self._num_bytes = 0
        self._peak_bytes = 0
        """The largest `_num_bytes` since freed memory was last returned to the kernel."""
        self._give_back = _malloc_trim()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        num_bytes, ended = 0, False
        decoder: BodyDecoder | None = None

        async def receive_counted() -> Message:
            nonlocal num_bytes, ended, decoder
            if ended:
                self._release(num_bytes)
                num_bytes = 0
            elif int(declared) > MAX_BODY_BYTES:
                raise _too_large()
            decoder = decoder or BodyDecoder(headers.get("content-encoding", ""))
            message = await receive()
            if message["type"] == "http.request":
                is_last = not message.get("more_body", False)
                body = decoder.decode(
                    message.get("body", b""), MAX_BODY_BYTES - num_bytes, is_last=is_last
                )
                message = {**message, "body": body}
                size = len(body)
                if num_bytes + size > MAX_BODY_BYTES:
                    raise _too_large()
                self._take(size, is_small=num_bytes + size <= _SMALL_BODY_BYTES)
                num_bytes += size
                ended = is_last
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._release(num_bytes)

    def _take(self, num_bytes: int, *, is_small: bool) -> None:
        total = self._num_bytes + num_bytes
        if total > self._max_memory_bytes and not is_small:
            raise Overloaded(
                f"bodies that are being received take {self._num_bytes} bytes, and may take "
                f"{self._max_memory_bytes}; try again",
                _RETRY_DELAY_S,
            )
        self._num_bytes = total
        self._peak_bytes = max(self._peak_bytes, total)

    def _release(self, num_bytes: int) -> None:
        """Takes a body off the count. After a peak, asks glibc to return freed memory: otherwise
        glibc keeps all freed memory that lies below memory in use."""
        self._num_bytes -= num_bytes
        if self._peak_bytes > _TRIM_BYTES and self._num_bytes < self._peak_bytes // 2:
            self._peak_bytes = self._num_bytes
            asyncio.get_running_loop().call_soon(self._give_back)  # once the body is freed


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def _malloc_trim() -> Callable[[], None]:
    """glibc's `malloc_trim`; a function that does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
