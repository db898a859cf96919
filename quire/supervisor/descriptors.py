"""Descriptors that the supervisor keeps open for its services, whatever becomes of these."""

import os
import socket
from collections.abc import Iterable

from quire.sockets import listen


class Listeners:
    """The listening sockets of gateways. They outlive their gateways, so that a connection waits
    while one gateway takes the place of another."""

    def __init__(self, descriptors: Iterable[tuple[str, int, int]] = ()) -> None:
        """`descriptors` come from the supervisor before this one."""
        self._sockets = {(host, port): socket.socket(fileno=fd) for host, port, fd in descriptors}

    @property
    def descriptors(self) -> tuple[tuple[str, int, int], ...]:
        """The host, the port and the descriptor of each socket."""
        return tuple((*place, each.fileno()) for place, each in self._sockets.items())

    def get(self, host: str, port: int) -> int:
        """Return the descriptor of the socket that listens there. Raises OSError."""
        if (host, port) not in self._sockets:
            self._sockets[host, port] = listen(host, port)
        return self._sockets[host, port].fileno()

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


class ParentPipe:
    """A pipe that lets the children notice the death of the supervisor.

    The children hold the reading end. Only the supervisor holds the writing end, so the kernel
    closes it however the supervisor dies.
    """

    def __init__(self, descriptors: tuple[int, int] | None = None) -> None:
        """`descriptors` come from the supervisor before this one, if there was one."""
        self.descriptors = descriptors or os.pipe()
        self.reading_end = self.descriptors[0]

    def close(self) -> None:
        for each in self.descriptors:
            os.close(each)
