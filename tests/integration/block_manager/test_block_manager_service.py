"""quire.v1.BlockManager over a real grpc.aio server, as operators use it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from blockstore.memory_store import MemoryStore
from blockstore.records import Asserted, PoolSpec
from blockstore.registry import Load, Member
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import (
    block_manager_pb2,
    block_manager_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
)
from quire.v1 import block_manager_pb2 as pb
from services.block_manager.auditor import LastAudits
from services.block_manager.operators.drain import tell
from services.block_manager.operators.service import SERVICE_NAME, BlockManagerService
from services.block_manager.rounds import Connection, RoundRunner
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import InvalidRequest, Unauthenticated, VersionMismatch
from services.runtime.rpc.transport import RpcServer, open_channel
from tests.memory_registry import MemoryRegistry
from tests.secret import OTHER, SECRET, guard

SPEC = PoolSpec("tiny-1", "tiny", "f00d", num_blocks=11, block_size=4, block_bytes=64)
H0 = bytes(16)
DRAIN_TIMEOUT_S = 0.5


@dataclass
class Served:
    store: MemoryStore
    registry: MemoryRegistry
    stub: Any
    servers: list[RpcServer]

    async def announce(self, member_id: str, role: Any = "decode", address: str = "") -> Member:
        member = Member(
            member_id,
            role,
            address,
            "serving",
            started_unix_ms=1234,
            protocol_version=1,
            pool_id="tiny-1",
            model="tiny",
            load=Load(num_running=3, num_free_slots=5),
            engine={"backend": "cpu"},
        )
        await self.registry.announce(member, ttl_s=600)
        return member

    async def start_worker(
        self, worker: Any, register: Any, role: str, worker_id: str = ""
    ) -> None:
        """Start a worker beside an idle one of the same role, so that it may be drained."""
        worker_id = worker_id or f"{role}-1"
        await self.announce(f"{role}-idle", role, "nowhere:1")
        server = RpcServer(guard=guard(getattr(worker, "worker_id", worker_id)))
        register(worker, server.aio)
        self.servers.append(server)
        port = await server.start("127.0.0.1", 0)
        await self.announce(worker_id, role, f"127.0.0.1:{port}")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    store, registry = MemoryStore(), MemoryRegistry()
    connection = Connection(store, registry)

    async def connect() -> Connection:
        return connection

    server = RpcServer(SERVICE_NAME)  # Its guard has a test of its own.
    service = BlockManagerService(
        RoundRunner(connection, connect),
        "block_manager-1",
        SECRET.rpc_key,
        DRAIN_TIMEOUT_S,
        LastAudits(),
    )
    block_manager_pb2_grpc.add_BlockManagerServicer_to_server(service, server.aio)
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = block_manager_pb2_grpc.BlockManagerStub(channel)
        served = Served(store, registry, stub, [server])
        yield served
    for running in served.servers:
        await running.stop()


async def fill(store: MemoryStore) -> None:
    """Holder "h" has blocks 0 and 1, and block 0 is in the prefix index."""
    await store.register_pool(SPEC)
    await store.register_worker(SPEC, "decode-1")
    given = await store.allocate("tiny-1", "h", "decode-1", 7, [H0], 2)
    await store.commit("tiny-1", "h", 1, [(given.block_ids[0], H0)])


async def test_pools_are_listed_with_counters_that_add_up(served: Served) -> None:
    await fill(served.store)
    await served.store.register_pool(replace(SPEC, pool_id="tiny-2"))
    first, second = (await served.stub.ListPools(pb.ListPoolsRequest())).pools
    assert (first.pool_id, second.pool_id) == ("tiny-1", "tiny-2")
    assert (first.num_free, first.num_cached, first.num_held) == (9, 0, 2)
    assert (first.num_blocks, first.block_size, first.block_bytes) == (11, 4, 64)
    assert (first.num_holders, first.num_prefix_queries, first.num_prefix_hits) == (1, 1, 0)
    assert (list(first.worker_ids), list(second.worker_ids)) == (["decode-1"], [])


async def test_workers_are_listed_from_registry_and_pools(served: Served) -> None:
    """decode-1 serves, decode-2 is fenced, prefill-x has joined a pool but is not in the registry;
    a gateway is no worker."""
    await served.store.register_pool(SPEC)
    for worker_id in ("decode-1", "decode-2", "prefill-x"):
        await served.store.register_worker(SPEC, worker_id)
    await served.store.fence("tiny-1", "decode-2")
    await served.announce("decode-1", address="host:1")
    await served.announce("gateway-1", "gateway")
    workers = (await served.stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert [(worker.worker_id, worker.role, worker.state) for worker in workers] == [
        ("decode-1", "decode", pb.WORKER_STATE_SERVING),
        ("decode-2", "decode", pb.WORKER_STATE_FENCED),
        ("prefill-x", "prefill", pb.WORKER_STATE_STARTING),
    ]
    assert (workers[0].address, workers[0].load.num_running) == ("host:1", 3)
    assert (workers[0].engine["backend"], workers[0].started_unix_ms) == ("cpu", 1234)
    assert (workers[1].pool_id, workers[1].model) == ("tiny-1", "tiny")


async def test_an_audit_answers_the_recount(served: Served) -> None:
    await fill(served.store)
    (audit,) = (await served.stub.Audit(pb.AuditRequest())).pools
    assert audit == block_manager_pb2.PoolAudit(
        pool_id="tiny-1",
        num_blocks=11,
        num_free=9,
        num_held=2,
        num_holders=1,
        num_references=2,
        ledger_checked=True,
    )


async def test_a_pool_that_recovers_says_so_and_no_audit_blames_it(served: Served) -> None:
    await served.store.recover_pool(SPEC, 2, ["decode-1", "decode-2"])
    await served.store.reassert(SPEC, "decode-1", [Asserted("h", 1, 7, 0, (0, 1))], [])
    (pool,) = (await served.stub.ListPools(pb.ListPoolsRequest())).pools
    assert pool.recovering
    assert pool.missing_worker_ids == ["decode-2"]
    (audit,) = (await served.stub.Audit(pb.AuditRequest())).pools
    assert (audit.recovering, audit.ledger_checked) == (True, False)
    assert not audit.violations


async def test_a_pool_that_is_not_there_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await served.stub.Audit(pb.AuditRequest(pool_id="gone"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


class Drainable:
    """A worker's Connect that answers a drain after its load report, as real workers may; `answers`
    False: it does not answer."""

    def __init__(self, pb2: Any, role: str, worker_id: str, *, answers: bool = True) -> None:
        self.worker_id = worker_id
        self.refusal = ""
        """Why it refuses to drain, if it does."""
        self.response = getattr(pb2, f"{role.capitalize()}ConnectResponse")
        self.answers = answers
        self.hello: worker_pb2.Hello | None = None
        self.drains = 0
        self.closed = asyncio.Event()

    async def Connect(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for request in requests:
                if request.WhichOneof("command") == "hello":
                    self.hello = request.hello
                    yield self.response(welcome=worker_pb2.Welcome(worker_id=self.worker_id))
                    continue
                if self.refusal:
                    raise InvalidRequest(self.refusal)
                self.drains += 1
                self.next_role = request.drain.next_role
                if self.answers:
                    yield self.response(load=worker_pb2.WorkerLoad(num_running=9))
                    yield self.response(draining=worker_pb2.Draining(num_running=2))
        finally:
            self.closed.set()


class DrainableDecode(Drainable, decode_pb2_grpc.DecodeServicer): ...


class DrainablePrefill(Drainable, prefill_pb2_grpc.PrefillServicer): ...


async def start(
    served: Served, role: str, worker_id: str | None = None, *, answers: bool = True
) -> Drainable:
    """A worker that the registry lists as `<role>-1`."""
    name = worker_id or f"{role}-1"
    if role == "decode":
        worker: Drainable = DrainableDecode(decode_pb2, role, name, answers=answers)
        await served.start_worker(worker, decode_pb2_grpc.add_DecodeServicer_to_server, role)
    else:
        worker = DrainablePrefill(prefill_pb2, role, name, answers=answers)
        await served.start_worker(worker, prefill_pb2_grpc.add_PrefillServicer_to_server, role)
    return worker


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_is_told_to_drain(served: Served, role: str) -> None:
    worker = await start(served, role)
    answer = await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id=f"{role}-1"))
    assert answer.num_running == 2
    assert worker.hello == worker_pb2.Hello(
        peer_id="block_manager-1",
        protocol_version=PROTOCOL_VERSION,
        function_library=FUNCTION_LIBRARY,
    )
    async with asyncio.timeout(10):
        await worker.closed.wait()


async def drain_status(served: Served, worker_id: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id=worker_id))
    return raised.value.code()


async def test_drain_refuses_a_member_that_is_no_worker(served: Served) -> None:
    await served.announce("gateway-1", "gateway")
    assert await drain_status(served, "gateway-1") is grpc.StatusCode.NOT_FOUND
    assert await drain_status(served, "") is grpc.StatusCode.NOT_FOUND


async def test_a_worker_that_still_starts_cannot_be_drained_yet(served: Served) -> None:
    starting = replace(await served.announce("decode-1"), state="starting")
    await served.registry.announce(starting, ttl_s=600)
    assert await drain_status(served, "decode-1") is grpc.StatusCode.UNAVAILABLE


async def test_drain_spares_another_worker_at_the_address(served: Served) -> None:
    worker = await start(served, "decode", "decode-2")
    assert await drain_status(served, "decode-1") is grpc.StatusCode.UNAUTHENTICATED
    assert worker.hello is None
    assert worker.drains == 0


async def test_a_worker_that_does_not_answer_is_given_up(served: Served) -> None:
    worker = await start(served, "decode", answers=False)
    assert await drain_status(served, "decode-1") is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(10):
        await worker.closed.wait()


async def test_a_worker_whose_process_is_gone_is_unavailable(served: Served) -> None:
    await start(served, "decode")
    await served.servers.pop().stop()
    assert await drain_status(served, "decode-1") is grpc.StatusCode.UNAVAILABLE


class Refusing(decode_pb2_grpc.DecodeServicer):
    async def Connect(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await anext(requests)
        raise VersionMismatch("protocol 1, not 2")
        yield  # A generator, as gRPC expects of a streaming method.


async def test_a_worker_of_another_version_is_a_failed_precondition(served: Served) -> None:
    await served.start_worker(Refusing(), decode_pb2_grpc.add_DecodeServicer_to_server, "decode")
    assert await drain_status(served, "decode-1") is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_last_worker_of_a_role_stays_unless_the_operator_insists(served: Served) -> None:
    worker = await start(served, "decode")
    await served.registry.withdraw("decode-idle")
    await served.announce("prefill-1", "prefill")
    await served.registry.announce(
        replace(await served.announce("decode-2"), pool_id="another"), ttl_s=600
    )
    await served.registry.announce(
        replace(await served.announce("decode-3"), state="draining"), ttl_s=600
    )
    with pytest.raises(grpc.aio.AioRpcError, match="last decode worker") as raised:
        await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-1"))
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "of 2 there, 1 serves" in (raised.value.details() or "")
    assert "drain it with --force" in (raised.value.details() or "")
    changing = pb.DrainWorkerRequest(worker_id="decode-1", next_role="prefill")
    with pytest.raises(grpc.aio.AioRpcError, match="last decode worker") as raised:
        await served.stub.DrainWorker(changing)
    assert (raised.value.details() or "").endswith("start another one first")
    assert worker.drains == 0
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-1", force=True))
    assert worker.drains == 1


async def test_a_fenced_worker_does_not_count_as_serving(served: Served) -> None:
    await start(served, "decode")
    await served.store.register_pool(SPEC)
    await served.store.register_worker(SPEC, "decode-idle")
    await served.store.fence("tiny-1", "decode-idle")
    assert await drain_status(served, "decode-1") is grpc.StatusCode.FAILED_PRECONDITION


async def test_one_of_two_drains_of_the_last_two_workers_is_refused(served: Served) -> None:
    """The registry still lists both as serving."""
    workers = []
    for worker_id in ("decode-1", "decode-2"):
        worker = DrainableDecode(decode_pb2, "decode", worker_id)
        register = decode_pb2_grpc.add_DecodeServicer_to_server
        await served.start_worker(worker, register, "decode", worker_id)
        workers.append(worker)
    await served.registry.withdraw("decode-idle")
    answers = await asyncio.gather(
        *(
            served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id=worker.worker_id))
            for worker in workers
        ),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert [error.code() for error in refused] == [grpc.StatusCode.FAILED_PRECONDITION]
    assert sorted(worker.drains for worker in workers) == [0, 1]


async def test_a_worker_is_told_the_role_that_it_takes_next(served: Served) -> None:
    """A worker that refuses stays as it is, so another one may be drained at once."""
    worker = await start(served, "decode")
    asked = pb.DrainWorkerRequest(worker_id="decode-1", next_role="prefill")
    worker.refusal = "decode-1 drains already"
    with pytest.raises(grpc.aio.AioRpcError, match="decode-1 drains already") as raised:
        await served.stub.DrainWorker(asked)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    other = DrainableDecode(decode_pb2, "decode", "decode-2")
    register = decode_pb2_grpc.add_DecodeServicer_to_server
    await served.start_worker(other, register, "decode", "decode-2")
    await served.registry.withdraw("decode-idle")
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-2"))
    worker.refusal = ""
    with pytest.raises(grpc.aio.AioRpcError, match="last decode worker"):
        await served.stub.DrainWorker(asked)
    await served.announce("decode-3")
    await served.stub.DrainWorker(asked)
    assert (worker.drains, worker.next_role) == (1, "prefill")


async def test_a_worker_that_has_taken_a_role_counts_for_it_at_once(served: Served) -> None:
    """It was told to leave its old role a moment ago."""
    await start(served, "decode")
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-1", next_role="prefill"))
    await served.announce("decode-1", "prefill")
    worker = await start(served, "prefill")
    await served.registry.withdraw("prefill-idle")
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="prefill-1"))
    assert worker.drains == 1


async def test_a_worker_refuses_a_drain_signed_with_another_secret(served: Served) -> None:
    """The worker's own guard receives neither hello nor drain."""
    worker = await start(served, "decode")
    (member,) = [m for m in await served.registry.members() if m.member_id == "decode-1"]
    with pytest.raises(Unauthenticated):
        await tell(member, "somebody", OTHER.rpc_key, drain=worker_pb2.Drain())
    assert (worker.hello, worker.drains) == (None, 0)


async def test_a_process_without_the_secret_gets_no_drain(served: Served) -> None:
    """The process answers the hello, but not the proof."""
    worker = DrainableDecode(decode_pb2, "decode", "decode-1")
    server = RpcServer()
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server.aio)
    served.servers.append(server)
    port = await server.start("127.0.0.1", 0)
    member = await served.announce("decode-1", address=f"127.0.0.1:{port}")
    with pytest.raises(Unauthenticated, match="does not prove this deployment's secret"):
        await tell(member, "block_manager-1", SECRET.rpc_key, drain=worker_pb2.Drain())
    assert worker.drains == 0
