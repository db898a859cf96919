"""The one message between ranks: rank 0 calls a method of all `Rank`s.

A connection is a pair of Unix sockets. It needs no port, carries descriptors of locks, and closes
when the process at its other end has ended, however that ended. Calls are executed in their order.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

from services.pool.keeper import close_all
from services.runtime.errors import StartupError

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Call:
    """All ranks execute this method of `Rank`."""

    method: str
    arguments: tuple[Any, ...]
    num_descriptors: int = 0
    """How many descriptors follow; they are the last arguments."""
    is_answered: bool = True
    """Whether rank 0 waits for a `RankAnswer`. Parts of a step need none: no rank gets past an
    exchange that another one has not reached."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    value: Any = None
    failure: str = ""
    """Why the rank could not do it; empty if it did."""


class Descriptor(int):
    """An open file as the value of an answer. It is sent after the answer, and closed here."""


@dataclass(slots=True)
class Peers:
    """The connections of rank 0 to the others, from rank 1 on. Any thread may use them."""

    connections: Sequence[Connection]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, method: str, *arguments: Any) -> None:
        """Let the other ranks execute a part of a step, which this rank begins now."""
        with self._lock:
            self._send(Call(method, arguments, is_answered=False))

    def ask(
        self,
        method: str,
        *arguments: Any,
        meanwhile: Callable[[], None] = lambda: None,
        descriptors: Sequence[Sequence[int]] = (),
        limit_s: float | None = None,
    ) -> list[Any]:
        """Let the other ranks execute a method, execute it here too (`meanwhile`), and return their
        answers. Duplicates of each rank's `descriptors` follow.

        Raises StartupError if a rank could not do it, and TimeoutError if a rank has not answered
        in `limit_s`.
        """
        if not self._lock.acquire(timeout=-1 if limit_s is None else limit_s):
            raise TimeoutError
        try:
            self._send(Call(method, arguments, len(descriptors[0]) if descriptors else 0))
            for connection, fds in zip(self.connections, descriptors, strict=False):
                for fd in fds:
                    send_handle(connection, fd, None)
            meanwhile()
            return self._take_answers(None if limit_s is None else time.monotonic() + limit_s)
        finally:
            self._lock.release()

    def wait(self, progress: Callable[[], None]) -> None:
        """Call `progress` several times a second until all ranks have answered."""
        for connection in self.connections:
            while not connection.poll(_POLL_S):
                progress()

    def close(self) -> None:
        """Shut the connections down: the other ranks end. (Closing is not enough, while a thread
        polls them.)"""
        for connection in self.connections:
            with socket.socket(fileno=os.dup(connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _send(self, call: Call) -> None:
        octets = ForkingPickler.dumps(call)  # once for all connections
        for connection in self.connections:
            connection.send_bytes(octets)

    def _take_answers(self, give_up_at: float | None) -> list[Any]:
        values, failures = [], []
        for rank, connection in enumerate(self.connections, 1):
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            if not connection.poll(left_s):
                raise TimeoutError
            answer: RankAnswer = connection.recv()
            is_open = isinstance(answer.value, Descriptor)
            values.append(Descriptor(recv_handle(connection)) if is_open else answer.value)
            if answer.failure:
                failures.append(f"rank {rank}: {answer.failure}")
        if failures:
            close_all([value for value in values if isinstance(value, Descriptor)])
            raise StartupError("; ".join(failures))
        return values
