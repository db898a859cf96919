"""TLS of HTTP connections, with less work for each message than asyncio's.

    socket ── `TlsTransport`: OpenSSL with two buffers in memory ── `Connection`

asyncio's TLS keeps buffers and flow control of its own between the two, which costs 2.7 µs for each
write and 0.2 ms for each connection. Here each write is encrypted at once and given to the socket's
transport, whose buffer and limits are the only ones.
"""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from services.gateway.frontend.http.transport.open_connections import Connections


class TlsTransport(asyncio.BufferedProtocol):
    """The protocol of a socket's transport, and the transport of the connection that `make` makes
    after the handshake: the methods of one that connections use, so that no other sends plain text.

    Until then it takes the place of that connection among those of the server.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        connections: Connections,
        make: Callable[[], asyncio.BufferedProtocol],
    ) -> None:
        self._context = context
        self._make = make
        self._connections = connections
        self._buffer = connections.buffer
        self._handshake_timeout_s = connections.limits.header_timeout_s
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._raw: asyncio.Transport
        self._above: asyncio.BufferedProtocol | None = None
        """The connection; None until the handshake is done."""
        self._is_paused = False
        self._loop = asyncio.get_running_loop()

    # ── the protocol of the socket ───────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._timer = self._loop.call_later(self._handshake_timeout_s, self._raw.abort)
        if not self._connections.add(self):
            self._raw.abort()

    @property
    def address(self) -> str:
        peer = self._raw.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def has_unsent(self) -> bool:
        return False

    def evict(self) -> None:
        """Closes this connection, whose handshake is not done, to make room for a new one."""
        self._raw.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        if self._above is not None:
            self._above.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received.write(self._buffer[:nbytes])
        self._advance()

    def eof_received(self) -> None:
        """The client has closed without TLS's own message. The socket's transport closes too."""
        if self._above is not None:
            self._above.eof_received()

    def pause_writing(self) -> None:
        if self._above is not None:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._above is not None:
            self._above.resume_writing()

    def _advance(self) -> None:
        """Goes on with what was received, as far as it goes."""
        try:
            above = self._above or self._shake_hands()
            while self._has_more and not self._is_paused and not self._raw.is_closing():
                num_bytes, has_ended = self._decrypt()
                if num_bytes:
                    above.buffer_updated(num_bytes)
                if has_ended:
                    self.eof_received()
                    self.close()
                    return
        except ssl.SSLWantReadError:  # half a message of the handshake
            pass
        except ssl.SSLError:
            self._flush()  # OpenSSL has written what it has against the client
            self._raw.close()
        self._flush()

    def _decrypt(self) -> tuple[int, bool]:
        """Decrypts what was received into the buffer: many small records are one read, as they are
        without TLS. Returns the number of bytes, and whether the client has ended TLS."""
        num_bytes = 0
        while self._has_more and num_bytes < len(self._buffer):
            try:
                room: Any = self._buffer[num_bytes:]
                num_more: Any = self._ssl.read(len(room), room)
            except ssl.SSLWantReadError:  # half a record
                break
            if not num_more:
                return num_bytes, True
            num_bytes += num_more
        return num_bytes, False

    @property
    def _has_more(self) -> bool:
        """Whether there are bytes to read. Asking OpenSSL in vain costs an exception."""
        return bool(self._received.pending or self._ssl.pending())

    def _shake_hands(self) -> asyncio.BufferedProtocol:
        self._ssl.do_handshake()
        self._end_handshake()
        self._flush()
        self._above = above = self._make()
        above.connection_made(cast(asyncio.Transport, self))
        return above

    def _end_handshake(self) -> None:
        self._timer.cancel()
        self._connections.remove(self)

    def _flush(self) -> None:
        if self._to_send.pending and not self._raw.is_closing():
            self._raw.write(self._to_send.read())

    # ── the transport of the connection ──────────────────────────────────────────────────────────

    def write(self, data: bytes) -> None:
        if data and not self._raw.is_closing():
            self._ssl.write(data)  # all of it: memory has room
            self._raw.write(self._to_send.read())

    def close(self) -> None:
        """Closes when all is sent. Does not wait for the client's end of TLS."""
        if not self._raw.is_closing():
            with suppress(ssl.SSLError):
                self._ssl.unwrap()
            self._flush()
            self._raw.close()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Goes on in the next turn of the event loop with bytes that were received before."""
        if self._is_paused:
            self._is_paused = False
            self._raw.resume_reading()
            self._loop.call_soon(self._advance)

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._context
        return self._raw.get_extra_info(name, default)

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()
