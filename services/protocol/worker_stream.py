"""The streams Prefill/Connect and Decode/Connect, mostly their client's side.

A `StreamType` holds everything that differs between the two.
"""

from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any, Literal

from grpc import StatusCode, aio

from blockstore.registry import Role
from quire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from services.protocol.command_codec import command_to_wire
from services.protocol.event_codec import events_from_wire
from services.protocol.messages import Command, Event
from services.protocol.version import LIBRARIES, spoken_with
from services.runtime.rpc.message_batching import unpack_batch

RELOAD: Literal["reload"] = "reload"
"""In the place of a worker's next role: the worker serves new weights in the role that it has."""

Stream = aio.StreamStreamCall[Any, Any]
Metadata = tuple[tuple[str, str], ...]


class StreamEnded(Exception):
    """The worker closed the stream without an error, sent no message for too long, or sent bytes
    that are no message."""


class StreamType:
    """One of the two worker streams. `method` is the full name of its RPC. `add` adds a service, an
    object with a method `Connect`, to a server."""

    def __init__(self, name: str, messages: Any, services: Any) -> None:
        self.service_name = f"quire.v1.{name}"
        self.method = f"/{self.service_name}/Connect"
        self.request, self.response = (
            getattr(messages, f"{name}Connect{way}") for way in ("Request", "Response")
        )
        self.stub = getattr(services, f"{name}Stub")
        self.add = getattr(services, f"add_{name}Servicer_to_server")

    def connect(
        self, channel: aio.Channel, requests: AsyncIterator[Any] | None, metadata: Metadata
    ) -> Stream:
        """Open a stream. Without `requests` the caller writes the messages."""
        stream: Stream = self.stub(channel).Connect(requests, metadata=metadata)
        return stream

    def hello(self, peer_id: str, version: int) -> Any:
        """The first message of a gateway or a block manager to a worker that has this version."""
        spoken = spoken_with(version)
        hello = worker_pb2.Hello(
            peer_id=peer_id, protocol_version=spoken, function_library=LIBRARIES[spoken]
        )
        return self.request(hello=hello)

    def events(self, message: Any) -> Iterator[Event]:
        """Yield the events of a message and of the messages batched in it."""
        return chain.from_iterable(map(events_from_wire, unpack_batch(message)))

    def command(self, command: Command) -> Any:
        return self.request(**command_to_wire(command))


PREFILL = StreamType("Prefill", prefill_pb2, prefill_pb2_grpc)
DECODE = StreamType("Decode", decode_pb2, decode_pb2_grpc)


def stream_type(role: Role) -> StreamType:
    return PREFILL if role == "prefill" else DECODE


async def read(stream: Stream) -> Any:
    """Read the next message. Raises StreamEnded or AioRpcError."""
    message = await stream.read()
    if message is None:  # gRPC returns None for a message that it cannot decode
        raise StreamEnded("it sent bytes that are no message")
    if message is not aio.EOF:
        return message
    code = await stream.code()
    if code is StatusCode.OK:
        raise StreamEnded("the worker closed the stream")
    trailers = await stream.trailing_metadata()  # `stream.read` returns EOF for some errors
    raise aio.AioRpcError(code, aio.Metadata(), trailers, await stream.details())
