"""The parts that all HTTP connections of a server share: limits, a read buffer, and a pacer for
large reads."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from services.common.runtime.logging import get_logger
from services.gateway.frontend.http.transport.addresses import Addresses
from services.gateway.streaming.pacer import StreamPacer

_READ_BYTES = 16 * 1024
"""Size of one read. The parser needs about 5 ms for a read that is full of chunks of one byte."""
_LOG_EVERY_S = 10.0
_LOOKED_AT = 16
"""Idle connections that are looked at for one that has sent all."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits on what clients can take of an HTTP server."""

    max_connections: int = 4096
    header_timeout_s: float = 10.0
    """From the start of a connection, or the first byte of a request, to the end of its headers."""
    body_timeout_s: float = 60.0
    """From the end of the headers to the end of the body."""
    write_timeout_s: float = 20.0
    """How long a client may read nothing while there are bytes for it."""
    max_unsent_bytes: int = 16 * 1024
    """Unsent bytes of an answer, in this process, above which the request waits for its client."""


class Evictable(Protocol):
    @property
    def address(self) -> str:
        """The client's."""

    @property
    def has_unsent(self) -> bool:
        """Whether its client does not read, and a part of an answer waits for it."""

    def evict(self) -> None: ...
    def close(self) -> None:
        """Closes when all is sent."""


class Connections:
    """The open connections of one server, in one event loop.

    At `max_connections`, a new connection replaces the one that has been idle longest. So idle
    connections never keep a client out.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """The read buffer of all connections. A connection copies its bytes out of it in the
        callback that reports them."""
        self.pacer = StreamPacer(streams_per_turn=1)
        self._open: set[Evictable] = set()
        self._idle: dict[Evictable, None] = {}
        """Connections without a request, the longest idle first."""
        self._unserved: set[Evictable] = set()
        self._asking: set[Evictable] = set()
        self.addresses = Addresses(asyncio.get_running_loop().time)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._num_evicted = 0
        self._num_refused = 0
        self._log_timer: asyncio.TimerHandle | None = None

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_full(self, num_waiting: int = 0) -> bool:
        """`num_waiting`: accepted sockets that are to become connections."""
        return len(self._open) + num_waiting >= self.limits.max_connections

    def add(self, connection: Evictable) -> bool:
        """Adds a new, idle connection. False: all `max_connections` connections have requests, or
        the server stops."""
        if self._is_closed:
            return False
        if self.is_full() and not self.evict_idle():
            self.count_refused()
            return False
        self._open.add(connection)
        self._idle[connection] = None
        self._mark_unserved(connection)
        return True

    def evict_idle(self) -> bool:
        """Closes the connection that has been idle longest, if possible one whose client has its
        whole answer. False: none is idle."""
        longest_idle = tuple(islice(self._idle, _LOOKED_AT))
        if not longest_idle:
            return False
        self._log_soon()
        self._num_evicted += 1
        first = next((each for each in longest_idle if not each.has_unsent), longest_idle[0])
        self.remove(first)
        first.evict()
        return True

    def close(self) -> None:
        """Closes the idle connections, and refuses further ones: the server stops."""
        self._is_closed = True
        for connection in tuple(self._idle):
            connection.close()

    def count_refused(self) -> None:
        """Counts a connection that is closed although its client may wait for an answer."""
        self._log_soon()
        self._num_refused += 1

    def remove(self, connection: Evictable) -> None:
        """Removes a connection, if it is there."""
        if connection in self._open:
            self.mark_served(connection)
            self.mark_idle(connection)
            self._open.discard(connection)
            del self._idle[connection]

    def mark_idle(self, connection: Evictable) -> None:
        """Records that all requests of the connection are answered."""
        if connection in self._open and connection not in self._idle:
            self._idle[connection] = None
            if connection in self._asking:
                self._asking.remove(connection)
                self.addresses.answered(connection.address)

    def mark_busy(self, connection: Evictable, *, asks: bool) -> None:
        """Records that the connection has a request. `asks`: others make way for it."""
        if connection in self._idle:
            del self._idle[connection]
            if asks:
                self._asking.add(connection)
                self.addresses.asks(connection.address)
            self._mark_unserved(connection)

    def mark_served(self, connection: Evictable) -> None:
        """Records that an answer begins."""
        if connection in self._unserved:
            self._unserved.remove(connection)
            self.addresses.served(connection.address)

    def _mark_unserved(self, connection: Evictable) -> None:
        if connection not in self._unserved:
            self._unserved.add(connection)
            self.addresses.waits(connection.address)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` in a task, and holds a reference to the task, since the loop holds none."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _log_soon(self) -> None:
        """Logs one event for the evictions and refusals of the next `_LOG_EVERY_S` seconds."""
        if self._log_timer is None:
            self._log_timer = asyncio.get_running_loop().call_later(_LOG_EVERY_S, self._log)

    def _log(self) -> None:
        self._log_timer = None
        log.warning(
            "http_connections_at_limit",
            max_connections=self.limits.max_connections,
            num_evicted=self._num_evicted,
            num_refused=self._num_refused,
        )
        self._num_evicted = self._num_refused = 0
