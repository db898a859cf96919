"""A gateway and its workers in one event loop, in virtual time. All messages between them are
encoded and decoded as on the wire."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from quire.v1 import decode_pb2, prefill_pb2
from services.gateway.config import PartOptions
from services.gateway.gateway import Gateway
from services.gateway.request.metrics import RequestMeters
from services.gateway.request.records import Records
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.scheduling.explainer import Explainer
from services.gateway.scheduling.migration import Migration
from services.gateway.scheduling.router import Router
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.models.catalog import load_model
from services.gateway.workers.movers import Movers
from services.gateway.workers.worker import Worker
from services.protocol.messages import Command
from services.protocol.worker_stream import DECODE, PREFILL
from services.runtime.errors import InvalidRequest
from tests.integration.gateway.conftest import SPEC
from tests.integration.gateway.fakes import FakeDecode, FakePrefill, Session, member
from tests.memory_registry import MemoryRegistry


class WorkerSession(Session):
    """A worker's end of its stream. `corrupt` replaces a message by the messages to send."""

    def __init__(self, response: Callable[..., Any], arrive: Callable[[Any], None]) -> None:
        super().__init__(response)
        self._arrive = arrive
        self.corrupt: Callable[[Any], Iterator[Any]] = lambda message: iter([message])

    def send(self, **event: Any) -> None:
        for message in self.corrupt(self._response(**event)):
            self.send_unchanged(message)

    def send_unchanged(self, message: Any) -> None:
        """Send the message unchanged; it arrives one iteration of the loop later."""
        data = message.SerializeToString()
        arrived = type(message).FromString(data)
        asyncio.get_running_loop().call_soon(self._arrive, arrived)


class FakeConnection:
    """A connection without gRPC, in the place of `services.gateway.workers.connection.Peer`. A
    malformed message ends the stream, which is opened again at once."""

    def __init__(self, fake: FakePrefill | FakeDecode, directory: str) -> None:
        self.fake = fake
        self.worker = Worker(member(fake, "nowhere:1", directory), self._send)
        self._stream_type = PREFILL if fake.role == "prefill" else DECODE
        self.sink: Any = None

    def open(self, sink: Any) -> None:
        self.sink = sink
        responses = prefill_pb2.PrefillConnectResponse, decode_pb2.DecodeConnectResponse
        self.session = WorkerSession(responses[self.fake.role == "decode"], self._arrive)
        self.fake.sessions.append(self.session)
        self.worker.connected = True

    def break_stream(self) -> None:
        """Break the stream."""
        self.fake.sessions.remove(self.session)
        self.fake.on_closed(self.session)
        self.worker.connected = False
        self.sink.on_lost(self.worker, died=False)
        self.sink.on_change()

    def _send(self, command: Command) -> None:
        if not self.worker.connected:
            return
        message = self._stream_type.command(command)
        request = type(message).FromString(message.SerializeToString())
        self.fake.names.shorten(request)
        self.fake.seen.append(getattr(request, request.WhichOneof("command")))
        asyncio.get_running_loop().call_soon(self._execute, self.session, request)

    def _execute(self, session: WorkerSession, request: Any) -> None:
        if session in self.fake.sessions:
            try:
                self.fake.execute(session, request)
            except InvalidRequest:
                self._reconnect()

    def _arrive(self, message: Any) -> None:
        if not self.worker.connected:
            return
        self.fake.names.restore(message)
        try:
            for event in self._stream_type.events(message):
                self.sink.on_event(self.worker, event)
        except (KeyError, ValueError, InvalidRequest):
            self._reconnect()
        self.sink.on_change()

    def _reconnect(self) -> None:
        corrupt = self.session.corrupt
        self.break_stream()
        self.open(self.sink)
        self.session.corrupt = corrupt

    async def close(self) -> None:
        """The directory never removes it."""


class SettledDirectory(WorkerDirectory):
    """All workers are on one pool and stay in the registry."""

    def __init__(
        self, store: MemoryStore, connections: list[FakeConnection], directory: Path
    ) -> None:
        super().__init__(
            MemoryRegistry(), store, lambda _: connections[0], load_model, lambda: None
        )
        self._connections = {(one.worker.id, one.worker.member.role): one for one in connections}
        self._specs = {SPEC.pool_id: SPEC}
        self._models = {str(directory): load_model(str(directory))}


@dataclass
class FuzzedGateway:
    """`directory`: of the toy model."""

    directory: Path
    connections: list[FakeConnection] = field(default_factory=list)
    gateway: Gateway = field(init=False)
    dispatcher: Dispatcher = field(init=False)

    async def open(self, *fakes: FakePrefill | FakeDecode) -> None:
        store, registry, changes = MemoryStore(), MemoryRegistry(), ChangeNotifier()
        await store.register_pool(SPEC)
        self.connections = [FakeConnection(fake, str(self.directory)) for fake in fakes]
        directory = SettledDirectory(store, self.connections, self.directory)
        request_metrics = RequestMeters(CollectorRegistry())
        options = PartOptions(reserve_timeout_s=0.5)
        self.dispatcher = Dispatcher(
            directory,
            router := Router(store, b"secret"),
            registry,
            options,
            changes,
            request_metrics.record_end,
            Movers(b"").pull,
        )
        for connection in self.connections:
            connection.open(self.dispatcher)
        explainer = Explainer(self.dispatcher, directory, router, Records())
        self.gateway = Gateway(
            directory, self.dispatcher, changes, request_metrics, options, explainer
        )
        migration = Migration(directory, self.dispatcher, changes, options.reserve_timeout_s)
        self._moving = asyncio.create_task(migration.drain_workers())

    def connection(self, fake: FakePrefill | FakeDecode) -> FakeConnection:
        return next(connection for connection in self.connections if connection.fake is fake)

    async def close(self) -> None:
        self._moving.cancel()
        await asyncio.wait([self._moving])
        await self.dispatcher.close()
