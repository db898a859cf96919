"""Runs uvicorn in an already running event loop, whose process and signals are not uvicorn's."""

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from quire.sockets import join_host_port, listen
from services.gateway.http.connections import (
    MAX_HEAD_BYTES,
    Connection,
    ConnectionLimits,
    Connections,
    Departure,
)
from services.runtime.errors import StartupError
from services.runtime.rpc.tls import Newest, TlsFiles
from services.runtime.ticks import until_tick

_BACKLOG = 512
"""Connections that wait in the kernel; asyncio accepts as many in one turn of the event loop."""
_DATE_INTERVAL_S = 1.0
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
    listening: socket.socket | None = None,
    departure: Departure | None = None,
) -> AsyncIterator[int]:
    """Serves `app` inside the block; yields the port. Without `tls` it serves plain HTTP.

    `listening` is a socket that listens already, in place of `host` and `port`: the supervisor
    keeps it open while one gateway takes the place of another, so that connections wait and none is
    refused. `departure` lets the server leave its port before the end of the block.

    At the end of the block, running requests get `grace_s` (rounded up to whole seconds) to finish;
    then they are cancelled. All requests have ended when the context manager returns.

    Raises StartupError if the server cannot listen on the address, or the files of `tls` are wrong.
    """
    limits = limits or ConnectionLimits()
    departure = departure or Departure()
    connections = Connections(app, limits, departure)
    config = uvicorn.Config(
        connections,
        http=Connection,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # services.gateway.access.client_address has the rule
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(grace_s),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    context = None if tls is None else _tls_context(tls)
    listening = listening or _listen(host, port)
    _set_options(listening, limits)
    # `uvicorn.Server.serve` would set handlers of the process's signals, and gives a client a
    # minute for its TLS handshake.
    server.servers = [
        await asyncio.get_running_loop().create_server(
            lambda: Connection(config, server.server_state, {}),
            sock=listening,
            ssl=context,
            ssl_handshake_timeout=None if context is None else limits.header_timeout_s,
            backlog=_BACKLOG,
        )
    ]
    tasks = [
        asyncio.create_task(_set_dates(server), name="http"),
        asyncio.create_task(_depart(server, connections, departure), name="http departure"),
    ]
    try:
        yield listening.getsockname()[1]
    finally:
        for task in tasks:
            task.cancel()
        await server.shutdown()
        if cancelled := server.server_state.tasks:
            await asyncio.wait(cancelled)


async def _set_dates(server: uvicorn.Server) -> None:
    """Keeps the `Date` header of answers right. uvicorn's own loop wakes ten times a second."""
    while True:
        await server.on_tick(0)
        await asyncio.sleep(until_tick(_DATE_INTERVAL_S))


async def _depart(server: uvicorn.Server, connections: Connections, departure: Departure) -> None:
    """Accept no connection once the departure has begun."""
    await departure.begun.wait()
    for each in server.servers:
        each.close()
    connections.check_departure()


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
        return listen(host, port, _BACKLOG)
    except OSError as error:
        raise StartupError(
            f"HTTP: cannot listen on {join_host_port(host, port)}: {error.strerror or error}"
        ) from error


def _set_options(listening: socket.socket, limits: ConnectionLimits) -> None:
    # Accepted connections inherit the options. asyncio sets TCP_NODELAY only on a socket that names
    # its protocol, which create_server's does not. Without the option, a small write waits for the
    # client's delayed ACK.
    for option, value in (
        (socket.TCP_NODELAY, 1),
        # The kernel would otherwise buffer megabytes for a client that does not read.
        (socket.TCP_NOTSENT_LOWAT, limits.max_unsent_bytes),
        (socket.TCP_USER_TIMEOUT, round(1000 * limits.write_timeout_s)),
    ):
        listening.setsockopt(socket.IPPROTO_TCP, option, value)
