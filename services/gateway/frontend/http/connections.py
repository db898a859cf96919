"""What all HTTP connections of a server share: how many there may be, and whose turn it is."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from services.common.runtime.logging import get_logger
from services.gateway.streaming.pacer import StreamPacer

_READ_BYTES = 16 * 1024
"""One read. In chunks of one byte it takes the parser some 5 ms."""
_LOG_EVERY_S = 10.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`header_timeout_s`: from a connection's start, or a request's first byte, to the end of its
    headers; `body_timeout_s`: from there to the end of its body; `write_timeout_s`: how long a
    client may read nothing of what is there for it. `max_unsent_bytes`: of an answer, before its
    request has to wait for the client."""

    max_connections: int = 4096
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 20.0
    max_unsent_bytes: int = 16 * 1024


class Evictable(Protocol):
    def evict(self) -> None: ...


class Connections:
    """Of one server, in one event loop. At `max_connections` a new one takes the place of the one
    that has been idle longest, so that connections without requests keep nobody out."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.buffer = memoryview(bytearray(_READ_BYTES))
        """Where each connection reads to; it is parsed, or copied, in the same callback."""
        self.pacer = StreamPacer(at_once=1)
        self._open: set[Evictable] = set()
        self._idle: dict[Evictable, None] = {}
        """Without a request; the one that has been so for longest is first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_evicted = 0
        self._num_refused = 0
        self._log_timer: asyncio.TimerHandle | None = None

    def add(self, connection: Evictable) -> bool:
        """A new one, which is idle. False: it has no place, since all have requests."""
        is_full = len(self._open) >= self.limits.max_connections
        if is_full:
            longest_idle = next(iter(self._idle), None)
            if longest_idle is None:
                self._num_refused += 1
            else:
                self._num_evicted += 1
                self.remove(longest_idle)
                longest_idle.evict()
            self._log_soon()
            if longest_idle is None:
                return False
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def remove(self, connection: Evictable) -> None:
        """Again: no error."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def is_idle(self, connection: Evictable) -> None:
        """Its requests are answered."""
        if connection in self._open:
            self._idle[connection] = None

    def is_busy(self, connection: Evictable) -> None:
        """It has a request."""
        self._idle.pop(connection, None)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run it in a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _log_soon(self) -> None:
        """One event for all of the next seconds."""
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
