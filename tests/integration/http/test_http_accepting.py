"""While others ask, new connections of an address with many unserved ones enter one by one."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.gateway.frontend.http.transport import acceptor, server
from services.gateway.frontend.http.transport.acceptor import Acceptor
from services.gateway.frontend.http.transport.addresses import CROWD
from services.gateway.frontend.http.transport.open_connections import (
    ConnectionLimits,
    Connections,
)
from services.gateway.frontend.http.transport.server import http_server
from services.gateway.frontend.http.transport.tls_transport import TlsTransport
from tests.waiting import until

from .raw import LIMIT_S, Connection, connected

BUSY = "127.0.0.2"
SLOW = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
QUICK = SLOW.replace(b"slow", b"quick")


class Application:
    """Answers at once, but `/slow` only after `release`."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        self.paths.append(scope["path"])
        if scope["path"] == "/slow":
            await self.release.wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})


@asynccontextmanager
async def serving(application: Application, max_connections: int = 4096) -> AsyncIterator[int]:
    limits = ConnectionLimits(max_connections)
    async with http_server(application, "127.0.0.1", 0, 1, limits) as port:
        yield port


@asynccontextmanager
async def asking(
    port: int, number: int, request: bytes, address: str
) -> AsyncIterator[list[Connection]]:
    """So many connections, which have sent a request each."""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(connected(port, address=address)) for _ in range(number)
        ]
        for connection in opened:
            connection.send(request)
        yield opened


async def test_a_crowd_waits_while_another_client_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more enters than make the address crowded, and then the pace holds the others. New
    connections of other clients enter at once, and sockets that still wait close with the server.
    """
    monkeypatch.setattr(acceptor, "PACE_S", 3600.0)
    application = Application()
    async with AsyncExitStack() as stack:
        async with serving(application) as port:
            (slow,) = await stack.enter_async_context(asking(port, 1, SLOW, "127.0.0.1"))
            await until(lambda: application.paths)
            crowd = await stack.enter_async_context(asking(port, CROWD + 20, SLOW, BUSY))
            await until(lambda: len(application.paths) == 1 + CROWD + 1)
            async with asking(port, 5, QUICK, "127.0.0.1") as others:
                for connection in others:
                    assert (await connection.answer()).status == 200
            assert application.paths == ["/slow"] * (1 + CROWD + 1) + ["/quick"] * 5
            application.release.set()
            for connection in (slow, *crowd[: CROWD + 1]):
                assert (await connection.answer()).status == 200
        for connection in crowd[CROWD + 1 :]:
            assert await connection.closed() == b""


async def test_other_clients_that_come_together_do_not_have_the_crowds_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their sockets are accepted in one turn, and enter one after another in the next ones."""
    monkeypatch.setattr(acceptor, "PACE_S", 3600.0)
    application = Application()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(application))
        await stack.enter_async_context(asking(port, 1, SLOW, "127.0.0.1"))
        await until(lambda: application.paths)
        await stack.enter_async_context(asking(port, CROWD + 2, SLOW, BUSY))
        await until(lambda: len(application.paths) == 1 + CROWD + 1)
        for _ in range(5):  # without a turn of the event loop between them
            other = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            other.sendall(QUICK)
        await until(lambda: application.paths[1 + CROWD + 1 :] == ["/quick"] * 5)
        application.release.set()


class Flooded(socket.socket):
    """A listening socket that has another connection whenever the server has accepted all."""

    opened: list[socket.socket]

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except BlockingIOError:
            if len(self.opened) < 500:
                source = (BUSY, 0)
                self.opened.append(socket.create_connection(self.getsockname(), None, source))
            raise


async def test_connections_enter_while_others_arrive_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen = server._listen
    opened: list[socket.socket] = []

    def flooded(*address: Any) -> socket.socket:
        listening = Flooded(fileno=listen(*address).detach())
        listening.opened = opened
        return listening

    monkeypatch.setattr(server, "_listen", flooded)
    async with serving(Application()) as port, asking(port, 1, QUICK, "127.0.0.1") as (asks,):
        assert (await asks.answer()).status == 200
        assert len(opened) < 500
    for each in opened:  # some were about to enter when the server stopped
        with each, suppress(ConnectionError):
            each.settimeout(LIMIT_S)
            while each.recv(1 << 10):
                pass


async def test_a_crowd_enters_in_the_end() -> None:
    application = Application()
    async with serving(application) as port, asking(port, 1, SLOW, "127.0.0.1") as (slow,):
        await until(lambda: application.paths)
        async with asking(port, 60, SLOW, BUSY) as crowd:
            await until(lambda: len(application.paths) == 61)
            application.release.set()
            for connection in (slow, *crowd):
                assert (await connection.answer()).status == 200


async def test_connections_that_are_answered_make_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if they stay open: a client that is served quickly enters quickly."""
    monkeypatch.setattr(acceptor, "PACE_S", 0.5)
    application = Application()
    async with serving(application) as port, asking(port, 1, SLOW, "127.0.0.1") as (slow,):
        await until(lambda: application.paths)
        async with asyncio.timeout(LIMIT_S):  # a pace for each would take 50 s
            async with asking(port, 100, QUICK, BUSY) as quick:
                for connection in quick:
                    assert (await connection.answer()).status == 200
        application.release.set()
        assert (await slow.answer()).status == 200


async def test_a_client_that_is_alone_has_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PACE_S", 3600.0)
    application = Application()
    async with serving(application) as port, asking(port, 100, SLOW, BUSY) as crowd:
        await until(lambda: len(application.paths) == 100)
        application.release.set()
        for connection in crowd:
            assert (await connection.answer()).status == 200


async def test_probes_and_dashboards_do_not_make_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their requests are GET."""
    monkeypatch.setattr(acceptor, "PACE_S", 3600.0)
    application = Application()
    probe = SLOW.replace(b"POST", b"GET")
    async with serving(application) as port, asking(port, 1, probe, "127.0.0.1") as (slow,):
        await until(lambda: application.paths)
        async with asking(port, CROWD + 20, SLOW, BUSY) as crowd:
            await until(lambda: len(application.paths) == 1 + CROWD + 20)
            application.release.set()
            for connection in (slow, *crowd):
                assert (await connection.answer()).status == 200


async def test_a_client_that_leaves_while_it_waits_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one behind it enters instead."""
    monkeypatch.setattr(acceptor, "PACE_S", 0.5)
    application = Application()
    async with serving(application) as port, asking(port, 1, SLOW, "127.0.0.1") as (slow,):
        await until(lambda: application.paths)
        async with asking(port, CROWD + 1, SLOW, BUSY):
            await until(lambda: len(application.paths) == CROWD + 2)
            async with AsyncExitStack() as leaving:
                for _ in range(100):
                    await leaving.enter_async_context(connected(port, address=BUSY))
                async with asking(port, 1, QUICK, BUSY) as (stays,):
                    await leaving.aclose()
                    async with asyncio.timeout(LIMIT_S):  # a pace for each would take 50 s
                        assert (await stays.answer()).status == 200
            application.release.set()
            assert (await slow.answer()).status == 200


async def test_at_the_bound_the_sockets_that_wait_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flood replaces its own sockets that wait, not the idle connection of another client."""
    monkeypatch.setattr(acceptor, "PACE_S", 3600.0)
    application = Application()
    async with (
        serving(application, max_connections=60) as port,
        asking(port, 1, SLOW, "127.0.0.1") as (slow,),
        asking(port, 1, QUICK, "127.0.0.1") as (idle,),
    ):
        assert (await idle.answer()).status == 200
        with capture_logs() as logs:
            async with asking(port, CROWD + 100, b"", BUSY) as crowd:
                for connection in crowd[CROWD + 1 : CROWD + 11]:
                    assert await connection.closed() == b""
            idle.send(QUICK)
            assert (await idle.answer()).status == 200
        assert not logs
        application.release.set()
        assert (await slow.answer()).status == 200


async def test_a_process_without_files_accepts_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask the kernel again in each turn, which would log each time."""

    class Full(socket.socket):
        num_failures = 0

        def accept(self) -> tuple[socket.socket, Any]:
            if self.num_failures < 2:
                self.num_failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listen = server._listen
    monkeypatch.setattr(server, "_listen", lambda *address: Full(fileno=listen(*address).detach()))
    monkeypatch.setattr(acceptor, "_RETRY_S", 0.05)
    with capture_logs() as logs:
        async with serving(Application()) as port, asking(port, 1, QUICK, BUSY) as (asks,):
            assert (await asks.answer()).status == 200
    assert [line["event"] for line in logs] == ["http_cannot_accept"] * 2


async def test_connections_in_their_handshake_make_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count from when they enter, before their handshake; when they leave, others enter."""
    monkeypatch.setattr(acceptor, "PACE_S", 0.5)
    connections = Connections(ConnectionLimits())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    entered: list[TlsTransport] = []

    def make() -> TlsTransport:
        entered.append(TlsTransport(context, connections, asyncio.BufferedProtocol))
        return entered[-1]

    connections.addresses.asks("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = Acceptor(listening, connections, make)
        port = listening.getsockname()[1]
        async with asking(port, 1, b"", "127.0.0.3"):
            async with asking(port, CROWD + 1, b"", BUSY):
                await until(lambda: len(entered) == CROWD + 2)
                assert connections.addresses.is_crowded(BUSY)
            await until(lambda: not connections.addresses.is_crowded(BUSY))
            accepting.close()
        await asyncio.sleep(0)  # in which the connections close
