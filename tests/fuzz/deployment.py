"""A whole deployment in one process for fuzzing: a gateway behind gRPC and HTTP, operations behind
their relays, real workers over a model that is a function, and a ledger that can be audited."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from grpc import aio
from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from blockstore.registry import Member, Role
from quire.supervisor.child import Child, ChildSpec, Stage
from quire.supervisor.console import Console
from quire.supervisor.descriptors import Listeners, ParentPipe
from quire.supervisor.errors import ServeError
from quire.supervisor.roles import Roles
from quire.supervisor.service import SupervisorService
from quire.supervisor.upgrade import Upgrader
from quire.supervisor.worker_scaler import WorkerScaler
from quire.v1 import block_manager_pb2_grpc, inference_pb2_grpc, supervisor_pb2_grpc
from services.block_manager.auditor import LastAudits
from services.block_manager.operators.service import BlockManagerService
from services.block_manager.rounds import Connection, RoundRunner
from services.engine.batch import Row, RowOutput, RowResult
from services.gateway.config import PartOptions
from services.gateway.grpc.relay import BLOCK_MANAGER, SUPERVISOR, Relay, Target
from services.gateway.grpc.service import InferenceService
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.gateway.request.metrics import RequestMeters
from services.gateway.wiring import Wiring, start_gateway
from services.model.text.tokenizer import Tokenizer
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.metrics import WorkerMetrics
from services.runtime.rpc.transport import RpcServer, open_channel
from services.worker.limits import Limits
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles import ROLES
from services.worker.stream import WorkerStream
from tests.integration.gateway.conftest import write_model
from tests.memory_registry import MemoryRegistry
from tests.secret import SECRET, guard
from tests.unit.workers.conftest import running
from tests.unit.workers.fakes import Arena, FakeForward, join, make_pool, make_stamps
from tests.unit.workers.fakes import next_token as any_token
from tests.waiting import until

LIMIT_S = 30.0
VOCAB = 300
MAX_MODEL_LEN = 64
FIRST_TOKEN, NUM_TOKENS = 97, 26
"""The tokens are the letters a to z of a byte-level vocabulary."""


def expected(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(_letter(any_token(tokens)))
    return tokens[len(prompt) :]


def _letter(token: int) -> int:
    return FIRST_TOKEN + token % NUM_TOKENS


MOST_DIMENSIONS = 4096


class Letters(FakeForward):
    """A model whose draws are all greedy, and whose embeddings are all alike."""

    def _row(self, row: Row) -> RowResult:
        draws = [replace(d, sampling=replace(d.sampling, temperature=0.0)) for d in row.draws]
        match super()._row(replace(row, draws=tuple(draws))):
            case () if row.num_states:
                return RowOutput((), states=np.ones((row.num_states, MOST_DIMENSIONS), np.float32))
            case RowOutput(tokens) as told:
                return replace(told, tokens=tuple(map(_letter, tokens)))
            case tuple() as tokens:
                return tuple(map(_letter, tokens))
            case fault:
                return fault


class IdleChild(Child):
    """A service of the supervisor whose process never starts."""

    def __init__(self, spec: ChildSpec, pipe: ParentPipe) -> None:
        super().__init__(spec, pipe, Listeners(), Console(io.StringIO()), lambda: True)

    @property
    def failure(self) -> str:
        return "it never starts"


async def _refuse() -> None:
    raise ServeError("no other version is installed")


@dataclass
class Deployment:
    directory: Path
    stack: AsyncExitStack
    store: MemoryStore = field(default_factory=MemoryStore)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    workers: list[Any] = field(default_factory=list)
    assembly: Wiring = field(init=False)
    channel: aio.Channel = field(init=False)
    http: httpx.AsyncClient = field(init=False)
    tokenizer: Tokenizer = field(init=False)

    async def open(self) -> None:
        write_model(self.directory)
        self.tokenizer = Tokenizer.from_directory(self.directory)
        await self._start_workers()
        self.assembly = await self.stack.enter_async_context(
            start_gateway(
                self.store,
                self.registry,
                SECRET,
                PartOptions(poll_s=0.05, silence_s=60.0, client_priority=True),
                RequestMeters(CollectorRegistry()),
            )
        )
        await self._start_servers(await self._start_operations())
        await self.until(self.assembly.gateway.ready)

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(holds, limit_s=LIMIT_S)

    async def until_idle(self) -> None:
        """Wait until no request waits or runs and nothing is held; then check the ledger's laws."""
        ledger, dispatcher = self.store.ledger("pool"), self.assembly.dispatcher
        await self.until(lambda: not (dispatcher.num_waiting or dispatcher.num_running))
        await self.until(lambda: not (ledger.holders or ledger.waiters))
        await self.until(lambda: not any(worker.num_busy for worker in self.workers))
        assert (await self.store.audit("pool")).violations == ()
        (pool,) = self.assembly.directory.complete_pools("toy")
        for worker in (*pool.prefill, *pool.decode):
            assert worker.num_taken_slots == 0
            assert not worker.prefill_loads

    async def _start_workers(self) -> None:
        spec = await make_pool(self.store, 64, 4)
        stamps = make_stamps(self.directory / "stamps", spec)
        arena = Arena(4, stamps)
        limits = Limits(8, 64, MAX_MODEL_LEN, vocab_size=VOCAB, eos_token_ids=frozenset({0}))
        for role, kind in ROLES.items():
            membership = await join(self.store, spec, f"{role}-1", stamps)
            metrics = WorkerMetrics(CollectorRegistry())
            parts = WorkerParts(self.store, membership, Letters(arena), limits, metrics)
            worker = PoolWorker[Any](parts, kind)
            await self.stack.enter_async_context(running(worker))
            self.workers.append(worker)
            address = await self._serve(f"{role}-1", kind.stream.add, WorkerStream(worker))
            await self._announce(f"{role}-1", role, address)

    async def _serve(
        self, member_id: str, register: Callable[[Any, aio.Server], None], service: Any
    ) -> str:
        server = RpcServer(guard=guard(member_id))
        register(service, server.aio)
        port = await server.start("127.0.0.1", 0)
        self.stack.push_async_callback(server.stop)
        return f"127.0.0.1:{port}"

    async def _announce(self, member_id: str, role: Role, address: str) -> None:
        member = Member(
            member_id=member_id,
            role=role,
            address=address,
            state="serving",
            started_unix_ms=1,
            protocol_version=PROTOCOL_VERSION,
            pool_id="pool",
            model="toy",
            model_dir=str(self.directory),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
        )
        await self.registry.announce(member, ttl_s=1e6)

    async def _start_operations(self) -> tuple[Relay, Relay]:
        connection = Connection(self.store, self.registry)

        async def connect() -> Connection:
            return connection

        manager = await self._serve(
            "block_manager-1",
            block_manager_pb2_grpc.add_BlockManagerServicer_to_server,
            BlockManagerService(
                RoundRunner(connection, connect),
                "block_manager-1",
                SECRET.rpc_key,
                LIMIT_S,
                LastAudits(),
            ),
        )
        children: list[Child] = []
        pipe = ParentPipe()
        self.stack.callback(pipe.close)

        def start(spec: ChildSpec) -> Child:
            children.append(IdleChild(spec, pipe))
            return children[-1]

        groups = [ChildSpec(role, (), Stage.WORKER, role=role, model="toy") for role in ROLES]
        for group in groups:
            start(group.worker(1, 0))

        scaler = WorkerScaler(children, start, groups)
        # As in `quire serve`: without our interceptor.
        server = aio.server()
        roles = Roles(children, self.directory)  # no gateway has a socket there
        upgrader = Upgrader(children, start, scaler, roles, self.directory, {}, _refuse)
        self.stack.push_async_callback(upgrader.close)
        service = SupervisorService(scaler, upgrader, roles)
        supervisor_pb2_grpc.add_SupervisorServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.stack.push_async_callback(server.stop, None)
        found = Target(manager, "block_manager-1")
        return (
            Relay(BLOCK_MANAGER, lambda: [found], SECRET.rpc_key),
            Relay(SUPERVISOR, lambda: [Target(f"127.0.0.1:{port}")]),
        )

    async def _start_servers(self, relays: tuple[Relay, ...]) -> None:
        server = RpcServer()
        gateway = self.assembly.gateway
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(gateway), server.aio)
        for relay in relays:
            self.stack.push_async_callback(relay.close)
            server.aio.add_generic_rpc_handlers((relay.handlers(),))
        port = await server.start("127.0.0.1", 0)
        self.stack.push_async_callback(server.stop)
        self.channel = open_channel(f"127.0.0.1:{port}")
        self.stack.push_async_callback(self.channel.close)
        app = create_app(gateway, CollectorRegistry())
        http_port = await self.stack.enter_async_context(http_server(app, "127.0.0.1", 0, 1))
        url = f"http://127.0.0.1:{http_port}"
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False)
        await self.stack.enter_async_context(self.http)


@asynccontextmanager
async def _opened(directory: Path) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        deployment = Deployment(directory, stack)
        await deployment.open()
        yield deployment


@contextmanager
def deployed(directory: Path) -> Iterator[tuple[asyncio.Runner, Deployment]]:
    """A deployment that stays open between runs of the runner. One task opens and closes it, as
    task groups require."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        is_open: asyncio.Future[Deployment] = loop.create_future()
        close = asyncio.Event()

        async def keep() -> None:
            async with _opened(directory) as deployment:
                is_open.set_result(deployment)
                await close.wait()

        keeping = loop.create_task(keep())
        runner.run(_either(is_open, keeping))
        try:
            yield runner, is_open.result()
        finally:
            close.set()
            runner.run(_either(keeping))


async def _either(*futures: asyncio.Future[Any]) -> None:
    """Wait for the first of two tasks; raises its error."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()
