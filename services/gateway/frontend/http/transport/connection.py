"""One HTTP connection: uvicorn's httptools protocol, with limits on what a client can take.

    idle ── header_timeout_s ──▶ headers ── body_timeout_s ──▶ body ──▶ answer ──▶ idle
                                    └── refused, or answered before its end ──▶ closing

httptools refuses ambiguous framing (Content-Length together with Transfer-Encoding, bare line
feeds, folded headers). `Connection` adds timeouts, limits on sizes, and a limit on the work that
the connection may cause in one turn of the event loop.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import httptools
from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.gateway.frontend.http.failures import http_error
from services.gateway.frontend.http.transport.flow import ClosingTransport, Flow
from services.gateway.frontend.http.transport.open_connections import Connections

_MAX_HEAD_BYTES = 64 * 1024
"""Limit for a request's line and headers, and for what its body has beside its content: chunk
sizes and trailers. Each byte of content allows eight more; chunks of one byte need five."""
_LONG_HEAD = f"the headers take more than {_MAX_HEAD_BYTES} bytes"
_LONG_FRAMING = f"the framing of the body takes more than {_MAX_HEAD_BYTES} bytes"
_BULK_BYTES = 2048
"""Larger reads wait for the pacer, which lets one through in a turn of the event loop."""
_LINGER_S = 1.0
"""How long a closing connection still reads and drops what its client sends, so that the client can
read the answer. If the server closed at once, the kernel would answer unread bytes with a reset,
and the client might lose the answer."""
_MAX_DISCARDED_BYTES = 32 * 1024 * 1024
"""Limit for the bytes that are dropped in this way."""
_RESET = struct.pack("ii", 1, 0)
"""A value of SO_LINGER: closing the socket resets the connection."""


class _Refused(Exception):
    """Raised in a parser callback; `Connection` answers with this status and text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One client's connection. `connections`: what all connections of its server share."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._limits = connections.limits
        self._application: Any = self.app
        self.app: Any = self._answer
        self._socket: asyncio.Transport
        self._reading: Flow
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_framing_bytes = 0
        """Of the message that is being received, without the read in which it began, whose other
        bytes may belong to the message before."""
        self._heard = False
        """Whether any byte has come."""
        self._upgrade_ignored = False
        self._num_discarded: int | None = None
        """Number of dropped bytes; None while input is parsed."""
        self._lingers = False
        """Whether `close` waits for the client to read the answer."""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered; `cycle`, uvicorn's, is the one received last."""

    # ── open and close ───────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        transport.set_write_buffer_limits(high=self._limits.max_unsent_bytes)
        seen = ClosingTransport(transport, self.close, self._is_closing)
        super().connection_made(cast(asyncio.Transport, seen))
        self.flow = self._reading = Flow(transport, self.pipeline)
        self._set_timer(self._limits.header_timeout_s)
        if not self._connections.add(self):
            self._refuse(503, "too many connections, or the server stops; try again")
            self._socket.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._stop_timer()
        self._stop_write_timer()
        self.pipeline.clear()
        if self._answering is not None:  # uvicorn marks only `cycle` as disconnected
            self._disconnect(self._answering)
        super().connection_lost(exc)

    def close(self) -> None:
        """Closes after all answers are written. If the client still sends, lingers so that the
        client can read them."""
        if self._socket.is_closing() or self._lingers:
            return
        if self._num_discarded is None and not self._receives_body:
            self._socket.close()
            return
        self._lingers = True
        self._num_discarded = self._num_discarded or 0
        try:
            if self._socket.can_write_eof():  # TLS cannot
                self._socket.write_eof()
        except OSError:  # the client has reset the connection; asyncio has not seen that yet
            self._socket.abort()
            return
        self._socket.resume_reading()
        self._set_timer(_LINGER_S, self._socket.abort)

    def _is_closing(self) -> bool:
        return self._lingers or self._socket.is_closing()

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def has_unsent(self) -> bool:
        return self._socket.get_write_buffer_size() > 0

    def evict(self) -> None:
        """Closes this idle connection at once, to make room for a new one."""
        self._socket.abort()

    @property
    def _receives_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    # ── read ─────────────────────────────────────────────────────────────────────────────────────

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._connections.buffer[:nbytes])
        if nbytes <= _BULK_BYTES:
            self._take(data)
        else:
            self._reading.hold()
            self._connections.spawn(self._receive_in_turn(data))

    async def _receive_in_turn(self, data: bytes) -> None:
        await self._connections.pacer.wait()
        self._reading.release()
        self._take(data)

    def _take(self, data: bytes) -> None:
        if self._num_discarded is not None:
            self._discard(len(data))
        elif self.parser is not None:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._unset_keepalive_if_required()
        if self._timer is None:
            self._set_timer(self._limits.header_timeout_s)
        self._num_framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, _Refused):
                self._refuse(refused.status, str(refused))
            else:
                self._refuse(400, f"this is not a valid HTTP/1.1 request: {error}")
            return
        if self._num_framing_bytes > _MAX_HEAD_BYTES:
            in_body = self._receives_body
            self._refuse(*((400, _LONG_FRAMING) if in_body else (431, _LONG_HEAD)))

    def _parse(self, data: bytes) -> None:
        """Feeds `data` to the parser, and ignores a request to upgrade the connection, as HTTP
        allows.

        httptools takes the bytes after the headers of such a request for another protocol. So a new
        parser gets the headers again, without `Upgrade`, and then those bytes.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            line = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
            self._upgrade_ignored = False
            self.parser = httptools.HttpRequestParser(self)
            self._parse(b"".join([line, *fields, b"\r\n", data[upgrade.args[0] :]]))

    def on_message_begin(self) -> None:
        self._num_framing_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            self._upgrade_ignored = True
            return
        # A probe of /health, a scrape or a dashboard need not be fast.
        self._connections.mark_busy(self, asks=self.parser.get_method() == b"POST")
        self._set_timer(self._limits.body_timeout_s)
        super().on_headers_complete()

    def _check_head(self) -> None:
        """Refuses headers that httptools accepts and this server does not."""
        fields = sum(len(name) + len(value) + len(":\r\n") for name, value in self.headers)
        if len(self.url) + fields > _MAX_HEAD_BYTES:
            raise _Refused(431, _LONG_HEAD)
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _Refused(505, f"HTTP/{version} is not supported; HTTP/1.1 is")
        if self.parser.get_method() == b"CONNECT":
            raise _Refused(405, "method CONNECT is not supported")
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            raise _Refused(400, "a request has one Host header")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise _Refused(501, "the only supported Transfer-Encoding is chunked, of HTTP/1.1")

    def on_body(self, body: bytes) -> None:
        self._num_framing_bytes -= 9 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrade_ignored:
            self._stop_timer()
            super().on_message_complete()

    def _discard(self, num_bytes: int) -> None:
        assert self._num_discarded is not None
        self._num_discarded += num_bytes
        if self._num_discarded > _MAX_DISCARDED_BYTES:
            self._socket.abort()

    # ── answer ───────────────────────────────────────────────────────────────────────────────────

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application. An answer that starts before the end of its request's body closes
        the connection."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._connections.mark_served(self)
                if scope is self.scope and self._receives_body:
                    message["headers"] = [*message.get("headers", ()), CLOSE_HEADER]
            await send(message)

        await self._application(scope, receive, send_on)

    def on_response_complete(self) -> None:
        self._answering = None
        super().on_response_complete()
        if self._answering is None and not self._is_closing():
            self._connections.mark_idle(self)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answers a request that cannot be received with an error, and closes the connection.

        The error is not sent in two cases. If headers are refused while earlier requests wait for
        their answers, the connection closes after those answers. If a body is refused while its
        own answer has begun, or while earlier requests wait, the connection is aborted.
        """
        self._stop_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                self._num_discarded = 0
                return
            if cycle.response_started or self.pipeline:
                self._socket.abort()
                return
            self._disconnect(cycle)
        self._num_discarded = 0
        self._socket.write(_error_response(status, message, self.server_state.default_headers))
        self.close()

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self._socket.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _watch_writing(self, num_unsent_bytes: int) -> None:
        """Resets the connection if its client reads nothing for `write_timeout_s`. Without a reset,
        the kernel would keep trying to send the bytes that it has."""

        def check() -> None:
            num_now = self._socket.get_write_buffer_size()
            if num_now >= num_unsent_bytes:
                raw = self._socket.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self._socket.abort()
            else:
                self._watch_writing(num_now)

        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, check)

    # ── timers ───────────────────────────────────────────────────────────────────────────────────

    def _set_timer(self, delay_s: float, then: Callable[[], None] | None = None) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, then or self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _time_out(self) -> None:
        self._timer = None
        if not self._heard:
            self._socket.close()
        elif self._receives_body:
            self._refuse(408, f"the body did not arrive in {self._limits.body_timeout_s:g} s")
        else:
            self._refuse(408, f"the headers did not arrive in {self._limits.header_timeout_s:g} s")


def _error_response(status: int, message: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    body = to_json(http_error(status, message))
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        CLOSE_HEADER,
    ]
    if status == 503:
        own.append((b"retry-after", b"1"))
    fields = [b"%b: %b\r\n" % field for field in (*headers, *own)]
    return b"".join([STATUS_LINE[status], *fields, b"\r\n", body])
