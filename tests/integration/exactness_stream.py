"""The gateway's stream to a worker of the same process. It encodes and decodes every message, as
gRPC does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import worker_pb2
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.workers.worker import Worker
from services.protocol.codec import load_from_wire
from services.protocol.messages import Began, Command
from services.protocol.version import PROTOCOL_VERSION
from services.protocol.worker_stream import DECODE, PREFILL, StreamType

HELLO = worker_pb2.Hello(
    peer_id="gateway", protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
)


class Stream:
    """The gateway's stream to a worker, without gRPC, in the place of
    `services.gateway.workers.connection.Peer`.

    `connect`: the method of the worker's service. After a cut, the gateway gets no more messages.
    """

    def __init__(self, member: Member, connect: Callable[..., Any], sink: Dispatcher) -> None:
        self.worker = Worker(member, self._send)
        self.is_cut = False
        self.num_begun = 0
        self._stream_type: StreamType = PREFILL if member.role == "prefill" else DECODE
        self._sink = sink
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._outgoing.put_nowait(self._stream_type.request(hello=HELLO))
        self._receiving = asyncio.create_task(self._receive(connect))

    def cut(self) -> None:
        """End the stream as the death of its worker does."""
        self.is_cut, self.worker.connected = True, False
        self._sink.on_lost(self.worker, died=True)
        self._sink.on_change()

    async def close(self) -> None:
        self._receiving.cancel()
        with suppress(asyncio.CancelledError):
            await self._receiving

    def _send(self, command: Command) -> None:
        self._outgoing.put_nowait(self._stream_type.command(command))

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield through_wire(await self._outgoing.get())

    async def _receive(self, connect: Callable[..., Any]) -> None:
        async for message in connect(self._requests(), None):
            if not self.is_cut:
                self._on_message(through_wire(message))

    def _on_message(self, message: Any) -> None:
        if message.HasField("welcome"):
            self.worker.report(load_from_wire(message.welcome.load))
            self.worker.connected = True
            self._sink.on_change()
        for event in self._stream_type.events(message):
            self.num_begun += isinstance(event, Began)
            self._sink.on_event(self.worker, event)


def through_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())
