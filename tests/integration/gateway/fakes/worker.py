"""The common part of all fake workers: streams, the beginning of requests, and the registry
entry."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from google.protobuf.message import Message
from grpc import aio

from blockstore.registry import Load, Member, Role
from quire.v1 import worker_pb2
from services.gateway.identity import client_id
from services.protocol.version import LIBRARIES, PROTOCOL_VERSION, spoken_with
from services.runtime.errors import InvalidRequest, QuireError, Unavailable, VersionMismatch
from services.runtime.rpc.message_batching import unpack_batch
from services.runtime.rpc.transport import RpcServer
from tests.secret import guard

DELIVERY_S = 0.02
"""How long a fake lives after its last message. gRPC may drop messages that a client has not read
when a status follows at once; the end of a real process does not do that."""


class Names:
    """Fake workers know a request by its client's id, which has a digest appended on the wire. Of
    several requests with one id, it is the latest."""

    def __init__(self) -> None:
        self._on_the_wire: dict[str, str] = {}

    def shorten(self, message: Message) -> None:
        """Shorten the ids of a command."""

        def short(request_id: str) -> str:
            name = client_id(request_id)
            self._on_the_wire[name] = request_id
            return name

        _rename(message, short)

    def restore(self, message: Message) -> None:
        """Restore the ids of an event."""
        _rename(message, lambda name: self._on_the_wire.get(name, name))


class Verbatim(Names):
    """Keeps the ids: for tests in which several clients use the same one."""

    def shorten(self, message: Message) -> None: ...

    def restore(self, message: Message) -> None: ...


def _rename(message: Message, name_of: Callable[[str], str]) -> None:
    """Change every request_id in a message."""
    for field_, value in message.ListFields():
        if field_.name == "request_id":
            setattr(message, field_.name, name_of(value))
        elif isinstance(value, Message):
            _rename(value, name_of)
        elif field_.message_type and not field_.message_type.GetOptions().map_entry:
            for each in value:
                _rename(each, name_of)


class Session:
    """The stream of one gateway."""

    def __init__(self, response: Callable[..., Any]) -> None:
        self._response = response
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, **event: Any) -> None:
        self._outgoing.put_nowait(self._response(**event))

    def send_verbatim(self, message: Any) -> None:
        self._outgoing.put_nowait(message)

    def end(self) -> None:
        self._outgoing.put_nowait(None)

    def fail(self, error: QuireError) -> None:
        """Break the stream once its messages are sent."""
        self._outgoing.put_nowait(error)

    async def responses(self) -> AsyncIterator[Any]:
        while (response := await self._outgoing.get()) is not None:
            if isinstance(response, QuireError):
                await asyncio.sleep(DELIVERY_S)
                raise response
            yield response


@dataclass(eq=False)
class FakeWorker:
    """`seen`: all commands, in order. `together`: the kinds of commands of each message. `aborted`:
    by (request, attempt). `stuck`: its streams stay open without any message. `dies_of`: the
    request over which it dies once it has begun it."""

    role: ClassVar[Role]
    service: ClassVar[str]

    worker_id: str
    pool_id: str = "pool"
    protocol_version: int = PROTOCOL_VERSION
    max_model_len: int = 4096
    load: Load = field(default_factory=Load)
    seen: list[Any] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    together: list[list[str]] = field(default_factory=list)
    num_hellos: int = 0
    num_reports: int = 0
    num_deaths: int = 0
    dies_of: str = ""
    stuck: bool = False
    names: Names = field(default_factory=Names)

    async def serve(self, stream: AsyncIterator[Any], response: Callable[..., Any]) -> Any:
        hello = (await anext(stream)).hello
        spoken, theirs = spoken_with(self.protocol_version), hello.protocol_version
        if (theirs, hello.function_library) != (spoken, LIBRARIES[spoken]):
            raise VersionMismatch(f"{hello.peer_id} speaks {theirs}, this worker {spoken}")
        while self.stuck:
            await asyncio.sleep(0.01)
        self.num_hellos += 1
        session = Session(response)
        self.sessions.append(session)
        session.send(welcome=self._welcome())
        reading = asyncio.create_task(self._read(stream, session))
        reporting = asyncio.create_task(self._keep_reporting(session))
        try:
            async for message in session.responses():
                self.names.restore(message)
                yield message
        finally:
            reading.cancel()
            reporting.cancel()
            self.sessions.remove(session)
            self.on_closed(session)

    async def _read(self, stream: AsyncIterator[Any], session: Session) -> None:
        async for together in stream:
            self.names.shorten(together)
            requests = list(unpack_batch(together))
            self.together.append([request.WhichOneof("command") for request in requests])
            for request in requests:
                self.seen.append(getattr(request, request.WhichOneof("command")))
                try:
                    self.execute(session, request)
                except InvalidRequest as error:
                    session.fail(error)

    def execute(self, session: Session, request: Any) -> None:
        """Execute a command. An invalid one fails the request that it names, as at a real worker;
        InvalidRequest if it names none, which ends the stream."""
        kind = request.WhichOneof("command")
        command = getattr(request, kind)
        if kind == "abort" and not command.HasField("index"):
            self.aborted.append((command.request_id, command.attempt))
        execute = getattr(self, f"on_{kind}", self._refuse)
        try:
            execute(session, command)
        except InvalidRequest as error:
            about = getattr(command, "ticket", command)
            if not getattr(about, "request_id", ""):
                raise
            key = {"request_id": about.request_id, "attempt": about.attempt}
            self.on_abort(session, worker_pb2.Abort(**key))
            failed = worker_pb2.RequestFailed(code=error.code, message=str(error), **key)
            session.send(failed=failed)

    def _refuse(self, session: Session, command: Any) -> None:
        raise InvalidRequest(f"{self.worker_id} takes no {command.DESCRIPTOR.name}")

    async def _keep_reporting(self, session: Session) -> None:
        while True:
            if not self.stuck:
                session.send(load=self._load())
                self.num_reports += 1
            await asyncio.sleep(0.02)

    def begin(self, session: Session, command: Any, compute: Callable[[], None]) -> None:
        """Begin a request."""
        ticket = command.ticket
        cached = getattr(self, "num_cached", 0)
        key = {"request_id": ticket.request_id, "attempt": ticket.attempt}
        session.send(began=worker_pb2.Began(**key, num_cached_tokens=cached))
        if session not in self.sessions:
            return
        if ticket.request_id == self.dies_of:
            self.num_deaths += 1
            self.die()
        else:
            compute()

    def commands(self, kind: type) -> list[Any]:
        return [command for command in self.seen if isinstance(command, kind)]

    def register(self, server: aio.Server) -> None:
        raise NotImplementedError

    def on_closed(self, session: Session) -> None: ...

    def on_abort(self, session: Session, abort: worker_pb2.Abort) -> None: ...

    def close_streams(self) -> None:
        for session in self.sessions:
            session.end()

    def die(self) -> None:
        """Break all streams, as a death does. Afterwards it is a new worker."""
        for session in self.sessions:
            session.fail(Unavailable("the worker has died"))

    def report(self, load: Load, draining: bool = False) -> None:
        self.load = load
        for session in self.sessions:
            session.send(load=self._load(draining))

    def _load(self, draining: bool = False) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(
            num_running=self.load.num_running,
            num_free_slots=self.load.num_free_slots,
            num_pending_tokens=self.load.num_pending_tokens,
            draining=draining,
        )

    def _welcome(self) -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            worker_id=self.worker_id,
            protocol_version=self.protocol_version,
            function_library=LIBRARIES[spoken_with(self.protocol_version)],
            pool_id=self.pool_id,
            load=self._load(),
        )


async def start(worker: FakeWorker) -> tuple[RpcServer, str]:
    """Start the worker's server; returns the server and its address."""
    server = RpcServer(worker.service, guard=guard(worker.worker_id))
    worker.register(server.aio)
    port = await server.start("127.0.0.1", 0)
    return server, f"127.0.0.1:{port}"


def member(worker: FakeWorker, address: str, model_dir: str) -> Member:
    return Member(
        member_id=worker.worker_id,
        role=worker.role,
        address=address,
        state="serving",
        started_unix_ms=1,
        protocol_version=worker.protocol_version,
        pool_id=worker.pool_id,
        model="toy",
        model_dir=model_dir,
        max_model_len=worker.max_model_len,
        max_num_seqs=getattr(worker, "num_slots", 64),
        load=worker.load,
        engine={"dtype": "float32"},
    )
