"""The worker connection: one Connect stream to a worker, with handshake, commands out, events in
and reconnects.

CONNECTING ──Welcome──▶ CONNECTED ──stream breaks──▶ CONNECTING (after a backoff) ...
    └──other version──▶ REFUSED (logged, never used; a new process has a new id)
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, NoReturn, Protocol

from grpc import StatusCode, aio

from blockstore.registry import Member
from blockstore.task_cancellation import cancel_task
from quire.v1 import worker_pb2
from services.gateway.workers.worker import Worker
from services.protocol.codec import load_from_wire
from services.protocol.messages import Command, Event
from services.protocol.version import LIBRARIES, spoken_with
from services.protocol.worker_stream import Stream, StreamEnded, read, stream_type
from services.runtime.errors import InvalidRequest, Unauthenticated, VersionMismatch
from services.runtime.logging import get_logger
from services.runtime.rpc.message_batching import Outbox, pack_batch
from services.runtime.rpc.proof import Proof
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import open_channel
from services.runtime.ticks import until_tick

log = get_logger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_NUM_SILENCE_CHECKS = 4


class WorkerEventSink(Protocol):
    """Receives the events of all workers. Called in the event loop; must not block."""

    def on_event(self, sender: Worker, event: Event) -> None: ...

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        """The stream to `worker` ended. By contract the worker then releases or parks everything
        that came over the stream. It `died` if the stream broke while the worker was not
        draining."""

    def on_change(self) -> None:
        """A worker connected or disconnected."""


class WorkerConnection:
    """Keeps a stream to one worker open until `close`.

    Workers report their load regularly. A worker that sends no message for `silence_s` is stuck:
    the connection closes its stream, and the requests that run there are lost.
    """

    def __init__(
        self,
        member: Member,
        gateway_id: str,
        rpc_key: bytes,
        sink: WorkerEventSink,
        silence_s: float = 2.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self.worker = Worker(member, self._send)
        self._stream_type = stream_type(member.role)
        self._gateway_id = gateway_id
        self._rpc_key = rpc_key
        self._sink = sink
        self._silence_s = silence_s
        self._tls = tls
        self._has_message = False
        self._outgoing: Outbox[Any] | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._last_reason = ""
        self._task = asyncio.create_task(self._keep_connected(), name=f"peer {member.member_id}")

    async def close(self) -> None:
        """End the stream. The requests of this gateway that run at the worker are lost."""
        await cancel_task(self._task)

    def _send(self, command: Command) -> None:
        # The outbox needs no bound: each request has only a few unsent commands.
        # Commands are encoded here, so that an encoding error fails one request, not the stream.
        # Nothing goes out before the worker has proven that it knows the secret.
        if self._outgoing is not None and self.worker.connected:
            self._outgoing.put(self._stream_type.command(command))

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._run_stream()
            except VersionMismatch as error:
                log.error("worker_refused", worker_id=self.worker.id, reason=str(error))
                return
            except (StreamEnded, Unauthenticated, InvalidRequest) as error:
                reason = str(error)
            except TimeoutError:
                reason = "no answer to the handshake"
            except aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:  # our own fault must not disconnect the worker for good
                log.error("worker_stream_failed", worker_id=self.worker.id, exc_info=error)
                reason = "a fault of this gateway"
            is_new = reason != self._last_reason  # warn once, not at each attempt to reconnect
            self._last_reason = reason
            (log.warning if is_new else log.debug)(
                "worker_disconnected", worker_id=self.worker.id, reason=reason
            )
            await asyncio.sleep(self._backoff_s * random.uniform(0.75, 1.25))
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    async def _run_stream(self) -> NoReturn:
        """Run one stream, from the hello to its end. Always raises: StreamEnded, AioRpcError,
        TimeoutError (no handshake), VersionMismatch or Unauthenticated."""
        proof = Proof(self._rpc_key, self._stream_type.method, self.worker.id)
        self._outgoing = outgoing = Outbox[Any](lambda command: int(command.ByteSize()))
        async with open_channel(self.worker.member.address, self._tls) as channel:
            stream = self._stream_type.connect(channel, self._requests(outgoing), proof.metadata)
            broke = False
            try:
                await self._complete_handshake(stream, proof)
                await self._listen_until_silent(stream)
            except aio.AioRpcError:
                broke = True
                raise
            finally:
                self._outgoing = None
                outgoing.close(drop=True)  # ends `_requests`, which would wait forever
                stream.cancel()
                if self.worker.connected:
                    self.worker.connected = False
                    self._sink.on_lost(self.worker, died=broke and not self.worker.draining)
                    self._sink.on_change()

    async def _requests(self, outgoing: Outbox[Any]) -> AsyncIterator[Any]:
        yield self._stream_type.hello(self._gateway_id, self.worker.member.protocol_version)
        while commands := await outgoing.take():
            yield pack_batch(commands)

    async def _complete_handshake(self, stream: Stream, proof: Proof) -> None:
        """Complete the handshake. Only after it succeeds are requests sent to the worker."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                message = await read(stream)
                proof.check(await stream.initial_metadata())
        except aio.AioRpcError as error:
            if error.code() is StatusCode.FAILED_PRECONDITION:
                raise VersionMismatch(error.details() or "the worker refused us") from error
            raise
        self._check(message.welcome)
        report = load_from_wire(message.welcome.load)
        self._backoff_s, self._last_reason = _FIRST_BACKOFF_S, ""
        self.worker.connected = True
        self.worker.unresponsive = False  # what it was asked on an earlier stream is lost with that
        self.worker.report(report)
        log.info("worker_connected", worker_id=self.worker.id, pool_id=message.welcome.pool_id)
        self._sink.on_change()

    def _check(self, welcome: worker_pb2.Welcome) -> None:
        """Raise VersionMismatch if the worker has another version, or is not the one that the
        registry lists at this address. (A first message without a welcome has no version.)"""
        member = self.worker.member
        spoken = spoken_with(member.protocol_version)
        theirs = (welcome.protocol_version, welcome.function_library)
        if theirs != (spoken, LIBRARIES[spoken]):
            raise VersionMismatch(
                f"it speaks protocol {theirs[0]} with function library {theirs[1]!r}, "
                f"we speak {spoken} with {LIBRARIES[spoken]!r}"
            )
        if (welcome.worker_id, welcome.pool_id) != (member.member_id, member.pool_id):
            raise VersionMismatch(
                f"at {member.address} is worker {welcome.worker_id} of pool {welcome.pool_id!r}"
            )

    async def _listen_until_silent(self, stream: Stream) -> NoReturn:
        try:
            async with asyncio.timeout(None) as limit:
                watch = asyncio.create_task(self._expire_when_silent(limit))
                try:
                    await self._listen(stream)
                finally:
                    watch.cancel()
        except TimeoutError:
            raise StreamEnded(f"no message for {self._silence_s:g} s") from None

    async def _expire_when_silent(self, limit: asyncio.Timeout) -> None:
        """Let `limit` expire after several checks in a row that saw no message. It counts checks
        instead of time, because a gateway process that was itself stopped received nothing."""
        num_silent = 0
        while num_silent < _NUM_SILENCE_CHECKS:
            self._has_message = False
            await asyncio.sleep(until_tick(self._silence_s / _NUM_SILENCE_CHECKS))
            num_silent = 0 if self._has_message else num_silent + 1
        limit.reschedule(asyncio.get_running_loop().time())

    async def _listen(self, stream: Stream) -> NoReturn:
        while True:
            message = await read(stream)
            self._has_message = True
            for event in self._stream_type.events(message):
                self._sink.on_event(self.worker, event)
