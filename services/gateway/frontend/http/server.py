"""uvicorn as a guest in a running event loop: it owns a socket, and nothing else of the process."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import StartupError
from services.common.runtime.config import join_host_port
from services.common.runtime.ticks import until_tick
from services.gateway.frontend.http.connection import Connection
from services.gateway.frontend.http.connections import ConnectionLimits, Connections

_BACKLOG = 2048
_DATE_INTERVAL_S = 1.0
_ACCEPTED_AT_ONCE = 16
"""Connections that one turn of the event loop accepts."""
_MAX_UNSENT_BYTES = 16 * 1024
"""Of an answer, in the kernel: it would take megabytes for a client that does not read."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that the client is the one that closes them."""


@asynccontextmanager
async def http_server(
    app: ASGIApp,
    host: str,
    port: int,
    grace_s: float = 10.0,
    limits: ConnectionLimits | None = None,
) -> AsyncIterator[int]:
    """Serve `app` inside the block; gives the port. Afterwards, requests that run get `grace_s`
    (whole seconds, rounded up), then they are cancelled; all have ended when the block is left.

    StartupError: the address cannot be listened on.
    """
    listening = _listen(host, port)
    connections = Connections(limits or ConnectionLimits())
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(Connection, connections=connections),  # type: ignore[arg-type]
            backlog=_ACCEPTED_AT_ONCE,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(grace_s),
        )
    )
    serving = asyncio.create_task(server.serve([listening]), name="http")
    try:
        yield listening.getsockname()[1]
    finally:
        server.leave()
        await serving
        if cancelled := server.server_state.tasks:
            await asyncio.wait(cancelled)
        listening.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """uvicorn's looks ten times a second whether it should exit. What else it does, with every
        tenth look, is to set the date that answers carry."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), until_tick(_DATE_INTERVAL_S))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's: `services.common.runtime.process`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio accepts as many at once as its backlog has; the kernel's is a longer one."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        raise StartupError(
            f"HTTP: cannot listen on {join_host_port(host, port)}: {error.strerror or error}"
        ) from error
    # Connections inherit both. asyncio sets TCP_NODELAY only where a socket names its protocol,
    # which create_server's does not: then a small write waits for the client's delayed ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
    return listening
