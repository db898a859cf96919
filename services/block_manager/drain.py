"""Tells a worker to drain, as a peer on a stream of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from services.common.errors import Unavailable, UnknownWorker
from services.common.rpc import open_channel, translated
from services.common.version import PROTOCOL_VERSION

_Connect = Callable[[AsyncIterator[Any]], AsyncIterator[Any]]


async def drain(members: tuple[Member, ...], worker_id: str, peer_id: str) -> int:
    """How many requests the worker still runs. UnknownWorker: not in the registry, or no worker;
    VersionMismatch; Unavailable: it does not answer."""
    worker = next((member for member in members if member.member_id == worker_id), None)
    if worker is None or worker.role not in ("prefill", "decode"):
        raise UnknownWorker(f"no worker {worker_id!r}")
    async with open_channel(worker.address) as channel:
        with translated():
            return await _drain(worker, channel, peer_id)


async def _drain(worker: Member, channel: aio.Channel, peer_id: str) -> int:
    connect, request = _dialect(worker, channel)
    answered = asyncio.Event()

    async def commands() -> AsyncIterator[Any]:
        yield request(
            hello=worker_pb2.Hello(
                peer_id=peer_id,
                protocol_version=PROTOCOL_VERSION,
                function_library=FUNCTION_LIBRARY,
            )
        )
        yield request(drain=worker_pb2.Drain())
        # The end of the commands is the end of the stream; the answer comes first.
        await answered.wait()

    try:
        async for response in connect(commands()):
            if response.WhichOneof("event") == "draining":
                return int(response.draining.num_running)
    finally:
        answered.set()
    raise Unavailable(f"worker {worker.member_id} ended the stream without an answer")


def _dialect(worker: Member, channel: aio.Channel) -> tuple[_Connect, Callable[..., Any]]:
    """The worker's Connect, and its type of requests."""
    stub: Any
    if worker.role == "prefill":
        stub = prefill_pb2_grpc.PrefillStub(channel)
        return stub.Connect, prefill_pb2.PrefillConnectRequest
    stub = decode_pb2_grpc.DecodeStub(channel)
    return stub.Connect, decode_pb2.DecodeConnectRequest
