"""A channel that is kept between calls. It is opened anew when the TLS files have changed, since a
channel keeps for its life the certificates that it began with."""

import asyncio

from grpc import aio

from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import open_channel

_GRACE_S = 30.0

_closing: set[asyncio.Task[None]] = set()
"""Holds a reference to each task, since the event loop holds none."""


class KeptChannel:
    """A channel to `address`. `tls` is None without TLS."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self.address = address
        self._tls = tls
        self._channel: aio.Channel | None = None
        self._version: object = None

    def get(self) -> aio.Channel:
        version = self._tls and self._tls.version
        if self._channel is None or version != self._version:
            self.leave()
            self._channel, self._version = open_channel(self.address, self._tls), version
        return self._channel

    def leave(self) -> None:
        """Close the channel once its calls have ended, in at most 30 s."""
        if self._channel is not None:
            closing = asyncio.create_task(self._channel.close(_GRACE_S))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)
            self._channel = None

    async def close(self) -> None:
        """Close the channel at once, with its calls."""
        if self._channel is not None:
            await self._channel.close()
