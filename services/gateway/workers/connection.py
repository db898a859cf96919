"""One Connect stream per worker: handshake, commands out, events in, and connecting again.

CONNECTING ──Welcome──▶ CONNECTED ──stream breaks──▶ CONNECTING (after a while) ...
    └──other version──▶ REFUSED (logged, never used; a new process has a new id)
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, NoReturn, Protocol

from grpc import StatusCode, aio

from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import worker_pb2
from services.common.errors import Unauthenticated, VersionMismatch
from services.common.rpc.message_batching import Outbox, bundled
from services.common.rpc.proof import Proof
from services.common.rpc.transport import open_channel
from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick
from services.gateway.workers.messages import (
    Command,
    DrainNotice,
    Event,
    LoadReport,
    RequestEvent,
    Reserved,
)
from services.gateway.workers.wire import DECODE, PREFILL, MalformedMessage, Stream
from services.gateway.workers.worker import Worker
from services.protocol.codec import load_from_wire
from services.protocol.version import PROTOCOL_VERSION

log = get_logger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
SILENCE_S = 2.0
_NUM_LOOKS = 4


class WorkerEventSink(Protocol):
    """Who hears what the workers say. Called in the event loop; must not block."""

    def on_event(self, sender: Worker, event: RequestEvent) -> None: ...

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        """The stream ended; by contract the worker has let go of all that came over it. `died`: it
        broke, and nobody expected that."""

    def on_report(self, worker: Worker) -> None:
        """Its load may be another, or what keeps it."""

    def on_change(self) -> None:
        """A worker came or went, or takes nothing new any more."""


class Silent(Exception):
    pass


class Closed(Exception):
    """The worker has ended the stream, and not because of an error."""


class WorkerConnection:
    """Keeps the stream to one worker until `close`. One that says nothing for `silence_s`, not even
    how loaded it is, is stuck: its stream is given up, and with it what runs there."""

    def __init__(
        self,
        member: Member,
        gateway_id: str,
        rpc_key: bytes,
        sink: WorkerEventSink,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.worker = Worker(member, self._send)
        self._dialect = PREFILL if member.role == "prefill" else DECODE
        self._gateway_id = gateway_id
        self._rpc_key = rpc_key
        self._sink = sink
        self._silence_s = silence_s
        self._heard = False
        self._outgoing: Outbox[Any] | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._last_reason = ""
        self._task = asyncio.create_task(self._keep_connected(), name=f"peer {member.member_id}")

    async def close(self) -> None:
        """End the stream; what runs there for us is lost."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _send(self, command: Command) -> None:
        # Not bounded by itself: a request has at most a few commands under way, and those are.
        # Encoded here: what cannot be is the fault of one request, and must not end the stream.
        # Nor before the worker has proven the secret.
        if self._outgoing is not None and self.worker.connected:
            self._outgoing.put(self._dialect.command(command))

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._session()
            except VersionMismatch as error:
                log.error("worker_refused", worker_id=self.worker.id, reason=str(error))
                return
            except Silent:
                reason = f"not a word for {self._silence_s:g} s"
            except Closed:
                reason = "the worker closed the stream"
            except MalformedMessage as error:
                reason = f"it sent {error}"
            except Unauthenticated as error:
                reason = str(error)
            except TimeoutError:
                reason = "no answer to the handshake"
            except aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:  # a fault of ours must not lose the worker for ever
                log.error("worker_stream_failed", worker_id=self.worker.id, exc_info=error)
                reason = "a fault of this gateway"
            is_news = reason != self._last_reason  # the same again, while it tries, is none
            self._last_reason = reason
            (log.warning if is_news else log.debug)(
                "worker_disconnected", worker_id=self.worker.id, reason=reason
            )
            await asyncio.sleep(self._backoff_s * random.uniform(0.75, 1.25))
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    async def _session(self) -> NoReturn:
        """One stream, from Hello to its end: Closed, AioRpcError, TimeoutError, Silent, Garbled,
        VersionMismatch, Unauthenticated."""
        proof = Proof(self._rpc_key, self._dialect.method, self.worker.id)
        self._outgoing = outgoing = Outbox[Any](lambda command: int(command.ByteSize()))
        async with open_channel(self.worker.member.address) as channel:
            stream = self._dialect.connect(channel, self._requests(outgoing), proof.metadata)
            broke = False
            try:
                await self._shake_hands(stream, proof)
                await self._listen_while_it_speaks(stream)
            except aio.AioRpcError:
                broke = True
                raise
            finally:
                self._outgoing = None
                outgoing.close(drop=True)  # who still waits for commands waits for ever
                stream.cancel()
                if self.worker.connected:
                    self.worker.connected = False
                    self._sink.on_lost(self.worker, died=broke and not self.worker.draining)
                    self._sink.on_change()

    async def _requests(self, outgoing: Outbox[Any]) -> AsyncIterator[Any]:
        yield self._dialect.hello(
            worker_pb2.Hello(
                peer_id=self._gateway_id,
                protocol_version=PROTOCOL_VERSION,
                function_library=FUNCTION_LIBRARY,
            )
        )
        while commands := await outgoing.take():
            yield bundled(commands)

    async def _shake_hands(self, stream: Stream, proof: Proof) -> None:
        """Nothing of a request goes to a worker before this has ended well."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                message = await read(stream)
                proof.check(await stream.initial_metadata())
        except aio.AioRpcError as error:
            if error.code() is StatusCode.FAILED_PRECONDITION:
                raise VersionMismatch(error.details() or "the worker refused us") from error
            raise
        self._check(message.welcome)
        report = LoadReport(*load_from_wire(message.welcome.load))
        self._backoff_s, self._last_reason = _FIRST_BACKOFF_S, ""
        self.worker.connected = True
        self.worker.report(report)
        log.info("worker_connected", worker_id=self.worker.id, pool_id=message.welcome.pool_id)
        self._sink.on_change()

    def _check(self, welcome: worker_pb2.Welcome) -> None:
        """VersionMismatch: not the worker that the registry announced, or one of another version.
        (One that says nothing of Welcome has none of the versions either.)"""
        member = self.worker.member
        theirs = (welcome.protocol_version, welcome.function_library)
        if theirs != (PROTOCOL_VERSION, FUNCTION_LIBRARY):
            raise VersionMismatch(
                f"it speaks protocol {theirs[0]} with function library {theirs[1]!r}, "
                f"we speak {PROTOCOL_VERSION} with {FUNCTION_LIBRARY!r}"
            )
        if (welcome.worker_id, welcome.pool_id) != (member.member_id, member.pool_id):
            raise VersionMismatch(
                f"at {member.address} is worker {welcome.worker_id} of pool {welcome.pool_id!r}"
            )

    async def _listen_while_it_speaks(self, stream: Stream) -> NoReturn:
        try:
            async with asyncio.timeout(None) as limit:
                watching = asyncio.create_task(self._watch(limit))
                try:
                    await self._listen(stream)
                finally:
                    watching.cancel()
        except TimeoutError:
            raise Silent from None

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Let the limit pass after some looks without a word between them. Looks, not a clock: a
        gateway that was stopped itself has not listened."""
        num_silent = 0
        while num_silent < _NUM_LOOKS:
            self._heard = False
            await asyncio.sleep(until_tick(self._silence_s / _NUM_LOOKS))
            num_silent = 0 if self._heard else num_silent + 1
        limit.reschedule(asyncio.get_running_loop().time())

    async def _listen(self, stream: Stream) -> NoReturn:
        while True:
            message = await read(stream)
            self._heard = True
            for event in self._dialect.events(message):
                self._hear(event)

    def _hear(self, event: Event) -> None:
        match event:
            case LoadReport():
                self.worker.report(event)
                self._sink.on_report(self.worker)
            case Reserved():
                self.worker.unresponsive = False
                self._sink.on_event(self.worker, event)
            case DrainNotice():
                self.worker.draining = True
                self._sink.on_change()
            case _:
                self._sink.on_event(self.worker, event)


async def read(stream: Stream) -> Any:
    """The next message. Closed, AioRpcError, Garbled."""
    message = await stream.read()
    if message is None:  # gRPC's word for what it could not decode
        raise MalformedMessage("bytes that are no message")
    if message is not aio.EOF:
        return message
    code = await stream.code()
    if code is StatusCode.OK:
        raise Closed
    metadata = aio.Metadata()  # `stream.read` answers EOF for some errors
    raise aio.AioRpcError(code, metadata, metadata, await stream.details())
