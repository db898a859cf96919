"""Drains workers for operators, over a Connect stream like a gateway's."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from grpc import StatusCode, aio

from blockstore.errors import UnknownPool
from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from services.block_manager.rounds import Connection
from services.common.errors import LastWorker, Unavailable, UnknownWorker
from services.common.rpc.message_batching import unpack_batch
from services.common.rpc.proof import Proof
from services.common.rpc.tls import TlsFiles
from services.common.rpc.transport import open_channel, translate_errors
from services.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:  # the class is generic only in the stubs
    _Stream = aio.StreamStreamCall[Any, Any]
else:
    _Stream = aio.StreamStreamCall


_REGISTRY_LAG_S = 5.0
"""How long the registry may still list a worker as serving after it was told to drain."""


class Drainer:
    """Drains workers for operators: one at a time, and never the last serving worker of its role on
    a pool, unless the operator forces it. `peer_id` and `rpc_key` identify this block manager to
    the workers. A worker has `timeout_s` to answer. `tls`: for connections to workers."""

    def __init__(
        self, peer_id: str, rpc_key: bytes, timeout_s: float, tls: TlsFiles | None = None
    ) -> None:
        self._peer_id = peer_id
        self._rpc_key = rpc_key
        self._timeout_s = timeout_s
        self._tls = tls
        self._lock = asyncio.Lock()
        self._recent: dict[str, float] = {}  # drained worker -> end of the lag

    async def drain(self, connection: Connection, worker_id: str, *, force: bool) -> int:
        """Tell a worker to drain. Returns how many requests it still runs.

        UnknownWorker: the registry lists no prefill or decode worker with this id; LastWorker;
        Unavailable: the worker is starting or does not answer; TimeoutError: it did not answer in
        time, and may drain nevertheless.
        """
        async with self._lock:  # the second of two drains must see the first
            members = await connection.registry.members()
            worker = _worker(members, worker_id)
            if not force:
                await self._require_another(connection, members, worker)
            # Noted even if no answer comes: the worker may have received the message.
            self._recent[worker_id] = asyncio.get_running_loop().time() + _REGISTRY_LAG_S
            async with asyncio.timeout(self._timeout_s):
                return await send_drain(worker, self._peer_id, self._rpc_key, self._tls)

    async def _require_another(
        self, connection: Connection, members: tuple[Member, ...], worker: Member
    ) -> None:
        """Raise LastWorker if `worker` is the last one of its role that serves the pool. A worker
        that drains already may be drained again."""
        now = asyncio.get_running_loop().time()
        self._recent = {told: until for told, until in self._recent.items() if until > now}
        fenced: tuple[str, ...] = ()
        with suppress(UnknownPool):
            fenced = (await connection.store.stats(worker.pool_id)).fenced_worker_ids
        peers = [m for m in members if (m.role, m.pool_id) == (worker.role, worker.pool_id)]
        serving = {m.member_id for m in peers if m.state == "serving"} - set(fenced)
        if worker.member_id in serving and serving - self._recent.keys() <= {worker.member_id}:
            raise LastWorker(
                f"{worker.member_id} is the last {worker.role} worker that serves {worker.model} "
                f"on pool {worker.pool_id} (of {len(peers)} there, 1 serves): start another one "
                "first, or drain it with --force, and requests wait until there is another one"
            )


def _worker(members: tuple[Member, ...], worker_id: str) -> Member:
    worker = next((member for member in members if member.member_id == worker_id), None)
    if worker is None or worker.role not in ("prefill", "decode"):
        raise UnknownWorker(f"no worker {worker_id!r}")
    if worker.state == "starting":
        raise Unavailable(f"{worker_id} has not started yet; try again")
    return worker


async def send_drain(
    worker: Member, peer_id: str, rpc_key: bytes, tls: TlsFiles | None = None
) -> int:
    """Tell `worker` to drain. Returns how many requests it still runs. Unauthenticated: another
    process is at its address; VersionMismatch; Unavailable: it does not answer."""
    async with open_channel(worker.address, tls) as channel:
        with translate_errors():
            return await _drain_over(worker, channel, peer_id, rpc_key)


async def _drain_over(worker: Member, channel: aio.Channel, peer_id: str, rpc_key: bytes) -> int:
    method = f"/quire.v1.{worker.role.capitalize()}/Connect"
    proof = Proof(rpc_key, method, worker.member_id)
    stream, request = _connect(worker, channel, proof)
    hello = worker_pb2.Hello(
        peer_id=peer_id, protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
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
