"""Bounds the connections of an HTTP server: their number, and the bytes and time of each.

    asyncio ── `Connection` ── uvicorn's protocol ── `Connections` ── the application

uvicorn itself bounds neither the headers of a request nor the connections that send none. A proxy
in front bounds each address, too: deploy/nginx.conf.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http.answering.sending import Json
from services.gateway.http.failures import http_error

MAX_HEAD_BYTES = 64 * 1024
"""Limit for a request's target and headers."""
_MAX_FRAMING_BYTES = 2 * MAX_HEAD_BYTES
"""Limit for what arrives beside a body and as many bytes again: headers, chunk sizes, trailers. One
read of asyncio's, 256 KiB at most, may exceed it."""
_NEEDS_H11 = re.compile(rb"\A[^\r\n]* HTTP/1\.0\r?\n|\r\nupgrade:", re.IGNORECASE)
"""A first request of which httptools would answer the one kind with chunks, and take the body of
the other kind for another protocol's. A server may ignore `Upgrade`, as h11 does."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits on what clients can take of an HTTP server."""

    max_connections: int = 4096
    header_timeout_s: float = 10.0
    """From the start of a connection, or the first byte of a request, to the end of its headers."""
    write_timeout_s: float = 20.0
    """How long a client may read nothing while there are bytes for it."""
    max_unsent_bytes: int = 16 * 1024
    """Unsent bytes of an answer, in this process and in the kernel each, above which the request
    waits for its client."""


class Connections:
    """The ASGI application that a server's connections call, which calls `app`.

    At the limit, a new connection replaces the one that has been idle longest, so that idle ones
    keep no client out. If none is idle, the request of the new one is answered with 503. A request
    whose client has gone is cancelled.
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, departing: asyncio.Event) -> None:
        self._app = app
        self._departing = departing
        self.limits = limits
        self.idle: dict[Connection, None] = {}
        """The connections without a request, the longest idle first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"].pop("connection")

        async def receive_counted() -> Message:
            message = await receive()
            connection.num_allowed += 2 * len(message.get("body", b""))
            # A connection that is not read, since a request waits in it, does not tell its end.
            connection.http.flow.resume_reading()
            return message

        if self._departing.is_set():
            connection.http.shutdown()  # with this answer, which says so
        connection.begin()
        try:
            answer = self._refusal(scope, connection) or self._app
            await answer(scope, receive_counted, send)
        except asyncio.CancelledError:
            if not connection.transport.is_closing():
                raise  # the server ends
        finally:
            connection.end()

    def _refusal(self, scope: Scope, connection: "Connection") -> Json | None:
        close = {"Connection": "close"}
        num_bytes = sum(len(name) + len(value) + len(":\r\n") for name, value in scope["headers"])
        if num_bytes + len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
            text = f"the headers take more than {MAX_HEAD_BYTES} bytes"
            return Json(http_error(431, text), 431, close)
        if len(connection.http.connections) > self.limits.max_connections:
            text = "too many connections; try again"
            return Json(http_error(503, text), 503, {**close, "Retry-After": "1"})
        return None


class Connection(asyncio.Protocol):
    """One client's connection: passes what asyncio reports to uvicorn's protocol."""

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        self._of_http = config, server_state, {**app_state, "connection": self}, _loop
        self.http: HttpToolsProtocol | H11Protocol = HttpToolsProtocol(*self._of_http)
        self.transport: asyncio.Transport
        self.num_allowed = 0
        """Bytes that may still arrive."""
        self._connections: Connections = config.app
        self._request: asyncio.Task[Any] | None = None
        """The task that answers a request now."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        limits, idle = self._connections.limits, self._connections.idle
        self.transport = transport
        transport.set_write_buffer_limits(high=limits.max_unsent_bytes)
        self.http.connection_made(transport)
        if len(self.http.connections) > limits.max_connections and idle:
            next(iter(idle)).abort()
        idle[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.idle.pop(self, None)
        self._stop_timer()
        self.http.connection_lost(exc)
        if self._request is not None:
            self._request.cancel()

    def data_received(self, data: bytes) -> None:
        cycle = self.http.cycle
        if cycle is None and _NEEDS_H11.search(data):
            self.http.connections.discard(self.http)
            self.http = H11Protocol(*self._of_http)
            self.http.connection_made(self.transport)
        if self._head_timer is None and (cycle is None or cycle.response_complete):
            self._expect_head()
        if self.num_allowed < 0:
            self.abort()
            return
        self.num_allowed -= len(data)
        self.http.data_received(data)

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()

    def abort(self) -> None:
        self._connections.idle.pop(self, None)
        self.transport.abort()

    def begin(self) -> None:
        """The application begins to answer a request."""
        self._stop_timer()
        self._connections.idle.pop(self, None)
        self._request = asyncio.current_task()

    def end(self) -> None:
        """A request has its answer, or no client."""
        self._request = None
        if not self.transport.is_closing():
            self._connections.idle[self] = None

    def _expect_head(self) -> None:
        self.num_allowed = _MAX_FRAMING_BYTES
        delay_s = self._connections.limits.header_timeout_s
        self._head_timer = asyncio.get_running_loop().call_later(delay_s, self.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
