"""Operations that the gateway relays to the block manager and to the supervisor."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc import aio

from blockstore.errors import StoreUnavailable
from blockstore.registry import Member
from quire.v1 import block_manager_pb2, block_manager_pb2_grpc
from quire.v1.supervisor_pb2 import ScaleRequest
from quire.v1.supervisor_pb2_grpc import SupervisorStub
from services.gateway.grpc.relay import BLOCK_MANAGER, SUPERVISOR, Relay, Target
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import UnknownWorker
from services.runtime.rpc.error_table import RemoteError
from services.runtime.rpc.transport import RpcServer, from_rpc_error, open_channel
from tests.secret import SECRET, guard
from tests.waiting import until


class OneOperation(block_manager_pb2_grpc.BlockManagerServicer):
    """A block manager that knows one operation and one worker."""

    seconds_left: float

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        self.seconds_left = context.time_remaining()
        if request.worker_id != "decode-1":
            raise UnknownWorker(f"no worker {request.worker_id}")
        return block_manager_pb2.DrainWorkerResponse(num_running=3)


class NoStore(block_manager_pb2_grpc.BlockManagerServicer):
    """A block manager on a host that does not reach Redis."""

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        raise StoreUnavailable("redis://r:6379: no answer (gave up after 5 s)")


def targets(members: Sequence[Member]) -> list[Target]:
    return [Target(member.address, member.member_id) for member in members]


async def in_front_of(harness: Any, name: str, relay: Relay) -> aio.Channel:
    """A channel to a server that relays the service of that name."""
    front = RpcServer(name)
    front.aio.add_generic_rpc_handlers((relay.handlers(),))
    channel = open_channel(f"127.0.0.1:{await front.start('127.0.0.1', 0)}")
    for close in (relay.close, front.stop, channel.close):
        harness.stack.push_async_callback(close)
    return channel


async def test_without_a_supervisor_scaling_says_who_else_may_do_it(harness: Any) -> None:
    channel = await in_front_of(harness, SUPERVISOR.name, Relay(SUPERVISOR, lambda: []))
    with pytest.raises(aio.AioRpcError) as error:
        await SupervisorStub(channel).Scale(ScaleRequest(num_decode=2))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "docker compose up --scale" in (error.value.details() or "")


async def test_operations_are_relayed_to_the_block_manager(harness: Any) -> None:
    directory = harness.assembly.directory
    relay = Relay(BLOCK_MANAGER, lambda: targets(directory.block_managers), SECRET.rpc_key)
    channel = await in_front_of(harness, BLOCK_MANAGER.name, relay)
    stub = block_manager_pb2_grpc.BlockManagerStub(channel)
    request = block_manager_pb2.DrainWorkerRequest(worker_id="decode-1")
    with pytest.raises(aio.AioRpcError) as error:
        await stub.DrainWorker(request)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    manager, server = OneOperation(), RpcServer(guard=guard("bm"))  # type: ignore[abstract]
    block_manager_pb2_grpc.add_BlockManagerServicer_to_server(manager, server.aio)
    port = await server.start("127.0.0.1", 0)
    harness.stack.push_async_callback(server.stop)
    address = f"127.0.0.1:{port}"
    entry = Member("bm", "block_manager", address, "serving", 1, PROTOCOL_VERSION)
    await harness.registry.announce(entry, ttl_s=1e6)
    dead = Member("a", "block_manager", "127.0.0.1:1", "serving", 1, PROTOCOL_VERSION)
    await harness.registry.announce(dead, ttl_s=1e6)
    await until(lambda: len(harness.assembly.directory.block_managers) == 2)
    with pytest.raises(aio.AioRpcError) as error:  # of another host, which cannot be reached
        await stub.DrainWorker(request, timeout=5)
    assert error.value.details() == "the block manager does not answer; try again"
    assert (await stub.DrainWorker(request, timeout=5)).num_running == 3
    assert 0 < manager.seconds_left < 6
    with pytest.raises(aio.AioRpcError) as error:
        await stub.DrainWorker(block_manager_pb2.DrainWorkerRequest(worker_id="x"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert isinstance(from_rpc_error(error.value), UnknownWorker)
    with pytest.raises(aio.AioRpcError) as error:
        await stub.ListPools(block_manager_pb2.ListPoolsRequest())
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert dict(error.value.trailing_metadata() or ())["quire-error-code"] == "internal"


async def test_a_block_manager_without_the_store_leaves_operations_to_another_one() -> None:
    async with AsyncExitStack() as stack:
        found = []
        for name, manager in (("a", NoStore()), ("b", OneOperation())):  # type: ignore[abstract]
            server = RpcServer(guard=guard(name))
            block_manager_pb2_grpc.add_BlockManagerServicer_to_server(manager, server.aio)
            found.append(Target(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", name))
            stack.push_async_callback(server.stop)
        relay = Relay(BLOCK_MANAGER, lambda: found, SECRET.rpc_key)
        stack.push_async_callback(relay.close)
        request = block_manager_pb2.DrainWorkerRequest(worker_id="decode-1").SerializeToString()
        with pytest.raises(RemoteError, match="the block store is not there"):
            await relay.send("DrainWorker", request, 5.0)
        for _ in range(2):
            answer = await relay.send("DrainWorker", request, 5.0)
            assert block_manager_pb2.DrainWorkerResponse.FromString(answer).num_running == 3
