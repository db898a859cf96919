"""Accepts connections, and lets those of an address that has many enter one after another.

    kernel's backlog ── accept ──▶ waiting, by address ── enter ──▶ `Connection`

Accepting a socket costs the event loop 20 µs; a connection and the first request on it cost about a
millisecond. So sockets are accepted as they come, and wait here until the loop has time for
them.
"""

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from services.common.runtime.logging import get_logger
from services.gateway.frontend.http.transport.addresses import CROWD
from services.gateway.frontend.http.transport.open_connections import Connections

log = get_logger(__name__)

_ACCEPTED_AT_ONCE = 8
"""Sockets that one turn of the event loop accepts."""
_ENTER_AT_ONCE = 2
"""Connections that enter in one turn of the event loop."""
PACE_S = 0.01
"""Between two connections of crowded addresses that enter."""
_RETRY_S = 1.0
"""After the process could not open another file."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections of one listening socket. `make`: makes the protocol of a connection.

    Addresses take turns. Those that are crowded (`Addresses`) wait for the pace too.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        make: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._listening = listening
        self._connections = connections
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[socket.socket]] = {}
        """By address; the address whose turn is next is the first."""
        self._num_waiting = 0
        self._paced_until = 0.0
        """No connection of a crowded address enters before."""
        self._next_turn: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stops, and closes the sockets that wait and the idle connections."""
        self._loop.remove_reader(self._listening)
        for handle in (self._next_turn, self._retry):
            if handle is not None:
                handle.cancel()
        while self._num_waiting:
            self._drop()
        self._connections.close()

    async def wait_closed(self) -> None:
        """Returns at once; uvicorn calls it."""

    def _listen(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                log.warning("http_cannot_accept", reason=str(error))
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(_RETRY_S, self._listen)
                break
            self._make_room()
            self._waiting.setdefault(peer[0], deque()).append(accepted)
            self._num_waiting += 1
        self._turn_at(0.0)

    def _make_room(self) -> None:
        """At the bound of connections, a new one replaces another: one that waits, if many do and
        fewer are idle, and otherwise one that is idle. If none is, it enters and is refused."""
        if self._connections.is_full(self._num_waiting):
            if self._num_waiting > max(CROWD, self._connections.num_idle):
                self._drop()
                self._connections.count_refused()
            else:
                self._connections.evict_idle()

    def _drop(self) -> None:
        """Closes the socket that has waited longest, of the address with the most."""
        address = max(self._waiting, key=lambda address: len(self._waiting[address]))
        self._next_of(address).close()

    def _next_of(self, address: str) -> socket.socket:
        """Takes the next socket of an address, whose next turn is after those of all others."""
        waiting = self._waiting.pop(address)
        self._num_waiting -= 1
        first = waiting.popleft()
        if waiting:
            self._waiting[address] = waiting
        return first

    def _turn_at(self, when: float) -> None:
        """`when`: a time of the event loop's clock; one in the past is the next turn. An earlier
        turn that is due stays: sockets that arrive all the time must not put it off."""
        if self._next_turn is not None:
            if self._next_turn.when() <= when:
                return
            self._next_turn.cancel()
        self._next_turn = self._loop.call_at(when, self._turn)

    def _turn(self) -> None:
        """Lets a few connections enter. If none may, all that wait wait for the pace."""
        self._next_turn = None
        num_entered = 0
        for address in tuple(self._waiting):
            is_crowded = self._connections.addresses.is_crowded(address)
            if is_crowded and self._loop.time() < self._paced_until:
                continue
            accepted = self._next_of(address)
            if _has_left(accepted):
                accepted.close()
            else:
                self._connections.addresses.waits(address)
                self._connections.spawn(self._enter(accepted, address))
                if is_crowded:
                    self._paced_until = self._loop.time() + PACE_S
            num_entered += 1
            if num_entered == _ENTER_AT_ONCE:
                break
        if self._waiting:
            self._turn_at(0.0 if num_entered else self._paced_until)

    async def _enter(self, accepted: socket.socket, address: str) -> None:
        """Until the connection is made, it counts as unserved here, and later in `Connections`. A
        client that leaves meanwhile is no error."""
        try:
            with suppress(OSError):
                await self._loop.connect_accepted_socket(self._make, accepted)
        finally:
            self._connections.addresses.served(address)


def _has_left(accepted: socket.socket) -> bool:
    """Whether the client has closed the connection without sending anything."""
    try:
        return not accepted.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
