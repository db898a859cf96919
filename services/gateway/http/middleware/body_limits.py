"""Bounds the time and the memory that request bodies take: each body, and all that arrive now."""

import asyncio
import ctypes
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.middleware.content_encoding import BodyDecoder
from services.runtime.errors import Overloaded
from services.runtime.rpc.transport import MAX_MESSAGE_BYTES

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
DEFAULT_BODY_MEMORY_BYTES = 256 * 1024 * 1024
"""For all bodies that have not arrived yet: sixteen of the largest ones."""
DEFAULT_BODY_TIMEOUT_S = 60.0
"""A proxy takes bodies of slower clients, and sends them at once."""
_SMALL_BODY_BYTES = 64 * 1024
"""This much of a body is always accepted, so that large bodies do not keep small ones out."""
_TRIM_BYTES = 32 * 1024 * 1024
"""Freed memory is returned to the kernel if bodies took more than this."""
_RETRY_DELAY_S = 1.0
_MAX_DROPPED_BYTES = 32 * 1024 * 1024
"""The most bytes of a body that are read and dropped after an answer that did not need them."""
_DROP_FOR_S = 2.0
"""How long they are read."""


class BodyLimits:
    """The outermost middleware: `receive` raises HTTPException 413 for a body of more than
    MAX_BODY_BYTES, HTTPException 408 for one that takes longer than `timeout_s`, and Overloaded if
    all bodies together would take more than `max_memory_bytes`. Bodies arrive decoded
    (`BodyDecoder`), and count with their decoded size.

    A body counts from its first byte until the application calls `receive` for the message after
    the body, or returns. The application makes that call after it has parsed the body.

    An answer that comes before the end of its request's body closes the connection. The rest of the
    body is dropped first, since a client that still sends could otherwise lose the answer.
    """

    def __init__(self, app: ASGIApp, max_memory_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_memory_bytes = max_memory_bytes
        self.timeout_s = timeout_s
        self._num_bytes = 0
        self._peak_bytes = 0
        """The largest `_num_bytes` since freed memory was last returned to the kernel."""
        self._give_back = _malloc_trim()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(self, Headers(scope=scope), receive, send)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            self.release(body.num_bytes)

    def take(self, num_bytes: int, *, is_small: bool) -> None:
        """Counts bytes that arrived. Raises Overloaded."""
        total = self._num_bytes + num_bytes
        if total > self._max_memory_bytes and not is_small:
            raise Overloaded(
                f"bodies that are being received take {self._num_bytes} bytes, and may take "
                f"{self._max_memory_bytes}; try again",
                _RETRY_DELAY_S,
            )
        self._num_bytes = total
        self._peak_bytes = max(self._peak_bytes, total)

    def release(self, num_bytes: int) -> None:
        """Takes a body off the count. After a peak, asks glibc to return freed memory: otherwise
        glibc keeps all freed memory that lies below memory in use."""
        self._num_bytes -= num_bytes
        if self._peak_bytes > _TRIM_BYTES and self._num_bytes < self._peak_bytes // 2:
            self._peak_bytes = self._num_bytes
            asyncio.get_running_loop().call_soon(self._give_back)  # once the body is freed


class _Body:
    """The body of one request."""

    def __init__(self, limits: BodyLimits, headers: Headers, receive: Receive, send: Send) -> None:
        self.num_bytes = 0
        """The bytes that count for `limits`."""
        self._limits = limits
        self._encoding = headers.get("content-encoding", "")
        self._decoder: BodyDecoder | None = None
        self._receive, self._send = receive, send
        self._declared = int(headers.get("content-length", "0"))
        self._has_ended = not self._declared and "transfer-encoding" not in headers
        self._until = asyncio.get_running_loop().time() + limits.timeout_s

    async def receive(self) -> Message:
        if self._has_ended:
            self._limits.release(self.num_bytes)
            self.num_bytes = 0
            return await self._receive()
        if self._declared > MAX_BODY_BYTES:
            raise _too_large()
        self._decoder = self._decoder or BodyDecoder(self._encoding)
        message = await self._next()
        if message["type"] != "http.request":
            return message
        body = self._decoder.decode(
            message.get("body", b""), MAX_BODY_BYTES - self.num_bytes, is_last=self._has_ended
        )
        size = len(body)
        if self.num_bytes + size > MAX_BODY_BYTES:
            raise _too_large()
        self._limits.take(size, is_small=self.num_bytes + size <= _SMALL_BODY_BYTES)
        self.num_bytes += size
        return {**message, "body": body}

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not arrive in {self._limits.timeout_s:g} s"
            raise HTTPException(408, text) from None
        self._has_ended = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start:
            await self._drop(0.0)  # what has arrived, perhaps all of it
        if self._has_ended:
            await self._send(message)
        elif is_start:
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            await self._send({**message, "headers": headers})
        else:
            await self._send({**message, "more_body": True})
            if not message.get("more_body", False):
                await self._drop(_DROP_FOR_S)
                await self._send({"type": "http.response.body"})

    async def _drop(self, time_s: float) -> None:
        """Reads the rest of the body, for `time_s` at most."""
        self._until = asyncio.get_running_loop().time() + time_s
        num_bytes = 0
        with suppress(HTTPException):
            while not self._has_ended and num_bytes < _MAX_DROPPED_BYTES:
                num_bytes += len((await self._next()).get("body", b""))


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


def _malloc_trim() -> Callable[[], None]:
    """glibc's `malloc_trim`; a function that does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
