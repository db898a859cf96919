"""A client that writes the bytes of its requests itself."""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

LIMIT_S = 10


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


@dataclass(frozen=True, slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, content: bytes) -> None:
        self.writer.write(content)

    async def answer(self) -> Answer:
        """The next answer, which must have a content length."""
        async with asyncio.timeout(LIMIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            line, *fields = head.decode().rstrip().split("\r\n")
            pairs = (field.split(": ", 1) for field in fields)
            headers = {name.lower(): value for name, value in pairs}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
            return Answer(int(line.split()[1]), headers, body)

    def reset_on_close(self) -> None:
        """Closing the socket then resets the connection, as the end of a killed client does."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def closed(self) -> bytes:
        """All bytes until the server closes."""
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def connected(
    port: int,
    *,
    receive_bytes: int | None = None,
    address: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Connection]:
    """A connection from `address`; `receive_bytes`: the approximate size of its receive buffer."""
    sock = socket.socket()
    sock.bind((address, 0))
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    name = None if tls is None else "127.0.0.1"
    reader, writer = await asyncio.open_connection(
        sock=sock, limit=1024, ssl=tls, server_hostname=name
    )
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def post(
    content: bytes, path: str = "/v1/completions", headers: str = "", length: int | None = None
) -> bytes:
    length = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{headers}\r\n"
    return head.encode() + content


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
