"""The worker's end of a gateway stream: handshake, then commands in and events out, in order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from quire.v1 import worker_pb2
from services.protocol.codec import load_to_wire
from services.protocol.command_codec import command_from_wire
from services.protocol.event_codec import Fields, event_to_wire
from services.protocol.messages import DrainNotice, Failed, LoadReport, WorkerEvent
from services.protocol.version import LIBRARIES, PROTOCOL_VERSION
from services.runtime.errors import InvalidRequest, VersionMismatch
from services.runtime.logging import get_logger
from services.runtime.rpc.message_batching import Outbox, pack_batch, unpack_batch
from services.runtime.ticks import until_tick
from services.worker.pool_worker import PoolWorker
from services.worker.roles.role import Role

_LOAD_INTERVAL_S = 0.25
_IDLE_INTERVALS = 4
"""An idle worker reports its load once in this many load intervals. That must stay well below the
time after which a gateway takes a silent worker for stuck."""
_MAX_UNREAD = 10_000
"""How many messages a gateway may leave unread before the worker closes its stream."""

log = get_logger(__name__)

Then = Callable[[], None] | None


def _size(unread: tuple[Fields, Then]) -> int:
    return sum(message.ByteSize() for message in unread[0].values())


class StreamSession:
    """The `Session` of one gateway's stream: keeps the messages that are not yet written.

    `peer_id` is the gateway's id, `version` the version of the protocol that it speaks.
    """

    def __init__(self, peer_id: str, version: int = PROTOCOL_VERSION) -> None:
        self.peer_id = peer_id
        self._version = version
        self._unread = Outbox[tuple[Fields, Then]](_size)

    def send(self, event: WorkerEvent, then: Then = None) -> None:
        self.put(event_to_wire(event, self._version), then)

    def put(self, fields: Fields, then: Then = None) -> None:
        """Queue a message; never blocks. A gateway that does not read loses its stream, and with it
        its requests. `then` is called once the message is written."""
        self._unread.put((fields, then))
        if len(self._unread) > _MAX_UNREAD:
            log.warning("stream_not_read", peer_id=self.peer_id, num_unread=_MAX_UNREAD)
            self.end()

    def end(self) -> None:
        """Close the session and drop all messages that are not written."""
        self._unread.close(drop=True)

    def finish(self) -> None:
        """Close the session after all queued messages are written."""
        self._unread.close()

    async def messages(self) -> AsyncIterator[list[Fields]]:
        """Yields queued messages in batches until the session is closed.

        A caller that asks for the next batch has written the last one: then its `then` are called.
        """
        while batch := await self._unread.take():
            yield [fields for fields, _ in batch]
            for _, then in batch:
                if then is not None:
                    then()


async def _keep_weights() -> bool:
    raise InvalidRequest("this worker cannot read its weights again")


class WorkerStream:
    """The `Connect` calls of one worker's gRPC service.

    If a command raises InvalidRequest, the request that it names fails. `read_weights` reads the
    weights again, and returns whether they are others than those that are served. `role` is this
    service's role; None means the only role of the worker.
    """

    def __init__(
        self,
        worker: PoolWorker[Any],
        read_weights: Callable[[], Awaitable[bool]] = _keep_weights,
        role: Role[Any] | None = None,
    ) -> None:
        self._worker = worker
        self._read_weights = read_weights
        self._role: Role[Any] = role or worker.role
        self._response = self._role.stream.response

    async def Connect(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        """Serve one stream from its hello to its end, and then close its session at the worker."""
        hello = await self._read_hello(request_iterator)
        session = StreamSession(hello.peer_id, hello.protocol_version)
        self._worker.sessions.add(session)
        log.info("peer_connected", peer_id=session.peer_id)
        reading = asyncio.create_task(self._read(session, request_iterator))
        reporting = asyncio.create_task(self._report_load(session))
        try:
            yield self._response(welcome=self._welcome(hello))
            async for batch in session.messages():
                yield pack_batch([self._response(**fields) for fields in batch])
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            reporting.cancel()
            self._worker.sessions.discard(session)
            self._role.close(session)
            log.info("peer_disconnected", peer_id=session.peer_id)

    async def _read_hello(self, requests: AsyncIterator[Any]) -> worker_pb2.Hello:
        """Read the hello of a gateway or a block manager. Raises VersionMismatch, and
        InvalidRequest if the first message is not a hello."""
        request = await anext(requests, None)
        if request is None or request.WhichOneof("command") != "hello":
            raise InvalidRequest("a worker stream begins with hello")
        hello: worker_pb2.Hello = request.hello
        theirs = hello.protocol_version, hello.function_library
        if theirs not in LIBRARIES.items():
            raise VersionMismatch(f"{hello.peer_id} speaks {theirs}, this worker {LIBRARIES}")
        return hello

    def _welcome(self, hello: worker_pb2.Hello) -> worker_pb2.Welcome:
        """The answer, in the version of the hello, which may be the one before this."""
        return worker_pb2.Welcome(
            worker_id=self._worker.worker_id,
            protocol_version=hello.protocol_version,
            function_library=hello.function_library,
            pool_id=self._worker.pool_id,
            load=self._load(),
        )

    def _load(self) -> worker_pb2.WorkerLoad:
        return load_to_wire(LoadReport(self._worker.load(), self._worker.draining))

    async def _report_load(self, session: StreamSession) -> None:
        while True:
            session.put({"load": self._load()})
            await self._wait_for_report()

    async def _wait_for_report(self) -> None:
        """Wait until the next load report is due. When the worker begins to drain, a report is due
        at once, so that gateways move its requests."""
        load, pause_s = self._worker.load(), _LOAD_INTERVAL_S
        if not load.num_running and not load.num_waiting:
            pause_s = until_tick(pause_s * _IDLE_INTERVALS)
        if self._worker.draining:
            await asyncio.sleep(pause_s)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._worker.drain_asked.wait(), pause_s)

    async def _read(self, session: StreamSession, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                for command in unpack_batch(request):
                    if command.WhichOneof("command") == "reload":
                        found = await self._read_weights()
                        session.send(DrainNotice(has_new_weights=found))
                    else:
                        self._execute(session, command)
        finally:
            session.end()

    def _execute(self, session: StreamSession, request: Any) -> None:
        name = request.WhichOneof("command")
        if name == "drain":
            role = request.drain.next_role or None
            session.send(DrainNotice(self._worker.drain(role)))
            return
        try:
            self._role.execute(session, command_from_wire(request))
        except InvalidRequest as error:
            if name in (None, "hello"):
                raise
            self._fail_request(session, getattr(request, name), error)

    def _fail_request(self, session: StreamSession, command: Any, error: InvalidRequest) -> None:
        """Fail the request that an invalid command names. If it names none, raise `error`, which
        ends the stream: the gateway could not tell which request failed."""
        about = command.ticket if "ticket" in command.DESCRIPTOR.fields_by_name else command
        if not about.request_id:
            raise error
        key = about.request_id, about.attempt
        self._role.abort(session, *key)  # a gateway sends no abort for a request that failed
        session.send(Failed(*key, error.code, str(error)))
