"""Runs uvicorn in an already running event loop: uvicorn owns the listening socket, but neither the
process nor its signals."""

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.sockets import join_host_port, listen
from services.common.errors import StartupError
from services.common.rpc.tls import Newest, TlsFiles
from services.common.runtime.ticks import until_tick
from services.gateway.frontend.http.transport.acceptor import Acceptor
from services.gateway.frontend.http.transport.connection import Connection
from services.gateway.frontend.http.transport.open_connections import (
    ConnectionLimits,
    Connections,
)
from services.gateway.frontend.http.transport.tls_transport import TlsTransport

_BACKLOG = 2048
"""Connections that wait in the kernel to be accepted."""
_DATE_INTERVAL_S = 1.0
_MAX_UNSENT_BYTES = 16 * 1024
"""Limit for the unsent bytes of one connection in the kernel, which would otherwise buffer
megabytes for a client that does not read."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that the client closes them and not the server."""


@asynccontextmanager
async def http_server(
    app: ASGIApp,
    host: str,
    port: int,
    grace_s: float = 10.0,
    limits: ConnectionLimits | None = None,
    tls: TlsFiles | None = None,
) -> AsyncIterator[int]:
    """Serves `app` inside the block; yields the port. `tls`: None serves plain HTTP.

    At the end of the block, running requests get `grace_s` (rounded up to whole seconds) to finish;
    then they are cancelled. All requests have ended when the context manager returns.

    StartupError: the server cannot listen on the address.
    """
    context = None if tls is None else _tls_context(tls)
    listening = _listen(host, port)
    limits = limits or ConnectionLimits()
    connections = Connections(limits)
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(Connection, connections=connections),  # type: ignore[arg-type]
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,  # services.gateway.access.client_address has the rule
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(grace_s),
        ),
        context,
        connections,
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
    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext | None, connections: Connections
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._connections = connections
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Sets the date header of answers once per second, until `leave`.

        uvicorn's own loop wakes ten times per second to check whether it should exit.
        """
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), until_tick(_DATE_INTERVAL_S))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service (`services.common.runtime.process`)."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Unlike uvicorn's, accepts by an `Acceptor`."""
        config = self.config
        protocol: Any = config.http_protocol_class
        make = partial(protocol, config, self.server_state, self.lifespan.state)
        if self._tls is not None:
            make = partial(TlsTransport, self._tls, self._connections, make)
        servers: Any = [Acceptor(each, self._connections, make) for each in sockets or ()]
        self.servers = servers
        self.started = True


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    """A context whose handshakes each have the newest files."""

    def context() -> ssl.SSLContext:
        made = files.server_context()
        made.set_alpn_protocols(["http/1.1"])
        return made

    newest = Newest(files, context)

    def use_newest(connection: ssl.SSLObject, _name: str | None, _context: object) -> None:
        connection.context = newest.get()

    first = context()
    first.sni_callback = use_newest
    return first


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = listen(host, port, _BACKLOG)
    except OSError as error:
        raise StartupError(
            f"HTTP: cannot listen on {join_host_port(host, port)}: {error.strerror or error}"
        ) from error
    # Accepted connections inherit both options. asyncio sets TCP_NODELAY only on a socket that
    # names its protocol, which create_server's does not. Without the option, a small write waits
    # for the client's delayed ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
    return listening
