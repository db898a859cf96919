"""Tells a worker to drain, over a Connect stream like a gateway's."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from grpc import StatusCode, aio

from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from services.common.errors import Unavailable
from services.common.rpc.message_batching import unpack_batch
from services.common.rpc.proof import Proof
from services.common.rpc.transport import open_channel, translate_errors
from services.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:  # the class is generic only in the stubs
    _Stream = aio.StreamStreamCall[Any, Any]
else:
    _Stream = aio.StreamStreamCall


async def drain(worker: Member, peer_id: str, rpc_key: bytes) -> int:
    """Tell `worker` to drain. Returns how many requests it still runs. Unauthenticated: another
    process is at its address; VersionMismatch; Unavailable: it does not answer."""
    async with open_channel(worker.address) as channel:
        with translate_errors():
            return await _drain(worker, channel, peer_id, rpc_key)


async def _drain(worker: Member, channel: aio.Channel, peer_id: str, rpc_key: bytes) -> int:
    method = f"/quire.v1.{worker.role.capitalize()}/Connect"
    proof = Proof(rpc_key, method, worker.member_id)
    stream, request = _connect(worker, channel, proof)
    hello = worker_pb2.Hello(
        peer_id=peer_id,
        protocol_version=PROTOCOL_VERSION,
        function_library=FUNCTION_LIBRARY,
    )
    response: Any
    try:
        with suppress(asyncio.InvalidStateError):  # the worker refused already: `read` says why
            await stream.write(request(hello=hello))
        while (response := await stream.read()) is not aio.EOF:
            for message in unpack_batch(response):
                match message.WhichOneof("event"):
                    case "welcome":
                        proof.check(await stream.initial_metadata())
                        # Not before the welcome: if the worker refuses the hello, a second message
                        # would hide the worker's reason.
                        await stream.write(request(drain=worker_pb2.Drain()))
                    case "draining":
                        return int(message.draining.num_running)
        await _raise_status(stream)
    finally:
        stream.cancel()
    raise Unavailable(f"worker {worker.member_id} ended the stream without an answer")


async def _raise_status(stream: _Stream) -> None:
    """Raise AioRpcError if the stream ended with an error: `read` returns EOF for some errors."""
    code = await stream.code()
    if code is not StatusCode.OK:
        metadata = await stream.trailing_metadata()
        raise aio.AioRpcError(code, aio.Metadata(), metadata, await stream.details())


def _connect(
    worker: Member, channel: aio.Channel, proof: Proof
) -> tuple[_Stream, Callable[..., Any]]:
    """Open a stream to the worker. Returns it with the type of its request messages."""
    stub: Any
    if worker.role == "prefill":
        stub = prefill_pb2_grpc.PrefillStub(channel)
        return stub.Connect(metadata=proof.metadata), prefill_pb2.PrefillConnectRequest
    stub = decode_pb2_grpc.DecodeStub(channel)
    return stub.Connect(metadata=proof.metadata), decode_pb2.DecodeConnectRequest
