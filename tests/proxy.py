"""A TCP proxy whose connections a test delays, breaks and half-opens."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class Proxy:
    """A proxy at `address` to `target` (host:port, or the path of a Unix socket).

    `delay_s` delays each piece in both directions. `hold` half-opens: connections stay and new ones
    are accepted, but nothing passes until `release`. `cut` resets all connections; `close` also
    refuses new ones.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.num_connections = 0
        self._target = target
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def open(self) -> None:
        """Accept connections, at the same address as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        self._passing.clear()

    def release(self) -> None:
        self._passing.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        with suppress(OSError):
            there = await self._connect()
            self._writers.add(there[1])
            for source, sink in ((reader, there[1]), (there[0], writer)):
                task = asyncio.create_task(self._pass_on(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            return
        writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("/"):
            return await asyncio.open_unix_connection(self._target)
        host, port = self._target.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Copy bytes until one side ends."""
        try:
            while data := await source.read(_CHUNK_BYTES):
                await asyncio.sleep(self.delay_s)
                await self._passing.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass  # one side was reset: so is the other
        finally:
            self._writers.discard(sink)
            sink.transport.abort()
