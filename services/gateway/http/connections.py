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
_HTTP_1_0 = re.compile(rb"[^\r\n]* HTTP/1\.0\r?\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


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


class Departure:
    """How a server leaves its port to the process that takes its place.

    From `begun` on, the server accepts no connection, and the answer to each further request asks
    the client to close its connection. `ended` is set when no connection is open any more: after
    the longest answer, and for a connection without requests after up to `_KEEP_ALIVE_S`.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()


class Connections:
    """The open connections of a server, and the ASGI application that they call, which calls `app`.

    At the limit, a new connection replaces the one that has been idle longest, so that idle ones
    keep no client out. If none is idle, the request of the new one is answered with 503.
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, departure: Departure) -> None:
        self._app = app
        self._departure = departure
        self.limits = limits
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """The connections without a request, the longest idle first."""

    def add(self, connection: "Connection") -> None:
        if len(self.open) >= self.limits.max_connections and self.idle:
            next(iter(self.idle)).abort()
        self.open.add(connection)
        self.idle[connection] = None

    def remove(self, connection: "Connection") -> None:
        self.open.discard(connection)
        self.idle.pop(connection, None)
        self.check_departure()

    def check_departure(self) -> None:
        """Note it if the last connection has closed since the server's departure began."""
        if self._departure.begun.is_set() and not self.open:
            self._departure.ended.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"].pop("connection")

        async def receive_counted() -> Message:
            message = await receive()
            connection.num_allowed += 2 * len(message.get("body", b""))
            return message

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        departs = self._departure.begun.is_set()

        connection.begin()
        try:
            answer = self._refusal(scope, connection) or self._app
            await answer(scope, receive_counted, send_last if departs else send)
        finally:
            connection.end()

    def _refusal(self, scope: Scope, connection: "Connection") -> Json | None:
        close = {"Connection": "close"}
        if connection.is_pipelining:
            text = "send one request after another: this server answers no pipelined requests"
            return Json(http_error(400, text), 400, close)
        num_bytes = sum(len(name) + len(value) + len(":\r\n") for name, value in scope["headers"])
        if num_bytes + len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
            text = f"the headers take more than {MAX_HEAD_BYTES} bytes"
            return Json(http_error(431, text), 431, close)
        if len(self.open) > self.limits.max_connections:
            text = "too many connections; try again"
            return Json(http_error(503, text), 503, {**close, "Retry-After": "1"})
        return None


class Connection(asyncio.Protocol):
    """One client's connection: passes what asyncio reports to uvicorn's protocol."""

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        self._of_http = config, server_state, {**app_state, "connection": self}, _loop
        self._http: HttpToolsProtocol | H11Protocol = HttpToolsProtocol(*self._of_http)
        self._connections: Connections = config.app
        self._transport: asyncio.Transport
        self.num_allowed = 0
        """Bytes that may still arrive."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=self._connections.limits.max_unsent_bytes)
        self._connections.add(self)
        self._expect_head()
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._stop_timer()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = self._http.cycle
        if cycle is None or cycle.response_complete:
            if self._head_timer is None:
                self._expect_head()
            if cycle is None and _HTTP_1_0.match(data):
                self._speak_http_1_0()
            # A server may ignore `Upgrade`. httptools would take the body for another protocol's.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
        elif not cycle.more_body:
            # uvicorn would tell only the last of several requests that the client has left.
            self.abort()
            return
        if self.num_allowed < 0:
            self.abort()
            return
        self.num_allowed -= len(data)
        self._http.data_received(data)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def abort(self) -> None:
        self._connections.remove(self)
        self._transport.abort()

    def begin(self) -> None:
        """The application begins to answer a request."""
        self._stop_timer()
        self._connections.idle.pop(self, None)

    def end(self) -> None:
        """A request has its answer."""
        if self in self._connections.open:
            self._connections.idle[self] = None

    def _speak_http_1_0(self) -> None:
        """Uses uvicorn's other protocol, which sends no chunks to a client of HTTP/1.0."""
        self._http.connections.discard(self._http)
        self._http = H11Protocol(*self._of_http)
        self._http.connection_made(self._transport)

    @property
    def is_pipelining(self) -> bool:
        """Whether the client has sent a request before the answer to another one."""
        return bool(getattr(self._http, "pipeline", ()))

    def _expect_head(self) -> None:
        self.num_allowed = _MAX_FRAMING_BYTES
        delay_s = self._connections.limits.header_timeout_s
        self._head_timer = asyncio.get_running_loop().call_later(delay_s, self.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
