"""Processes of this host without the deployment's secret, at the ports of its services and in its
registry: no service accepts a ticket from them, no worker leaves, and nothing is sent to them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from operator import lt
from typing import Any

import pytest
import redis.asyncio
from grpc import StatusCode, aio

from blockstore.redis_registry import encode
from blockstore.registry import Member
from blockstore.store import FUNCTION_LIBRARY
from quire.async_client import AsyncClient
from quire.reports import Worker
from quire.types import Sampling
from quire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    ticket_pb2,
    worker_pb2,
)
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.rpc.message_batching import unpack_batch
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.transport import RpcServer, open_channel
from tests.secret import OTHER, guard
from tests.waiting import until

from .deployment import Deployment

LIMIT_S = 60.0
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
HELLO = worker_pb2.Hello(
    peer_id="another", protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
)


def num_refused(deployment: Deployment) -> int:
    return deployment.log.read_text().count("peer_refused")


async def worker_of(client: AsyncClient, role: str) -> Worker:
    serving = (worker for worker in await client.workers() if worker.state == "serving")
    return next(worker for worker in serving if worker.role == role)


async def exchange(stub: Any, request: Any, **command: Any) -> tuple[StatusCode, list[str]]:
    """How a stream ends that begins with a hello and a command, and the messages that it got."""
    events: list[str] = []

    async def requests() -> AsyncIterator[Any]:
        yield request(hello=HELLO)
        yield request(**command)
        await asyncio.Event().wait()

    while True:
        stream = stub.Connect(requests())
        with suppress(aio.AioRpcError):
            async for message in stream:
                events += [one.WhichOneof("event") for one in unpack_batch(message)]
        # gRPC's client loses the server's status if it is just writing when the refusal arrives.
        if await stream.details() != "Internal error from Core":
            return await stream.code(), events


async def test_worker_refuses_a_client_without_the_secret(
    deployment: Deployment, client: AsyncClient
) -> None:
    ticket = ticket_pb2.Ticket(request_id="r1", attempt=1)
    commands: list[tuple[str, Any, Any, dict[str, Any]]] = [
        (
            "prefill",
            prefill_pb2_grpc.PrefillStub,
            prefill_pb2.PrefillConnectRequest,
            {"submit": prefill_pb2.PrefillSubmit(ticket=ticket)},
        ),
        (
            "decode",
            decode_pb2_grpc.DecodeStub,
            decode_pb2.DecodeConnectRequest,
            {"drain": worker_pb2.Drain()},
        ),
    ]
    contacted = set()
    for role, stub, request, command in commands:
        before = num_refused(deployment)
        worker = await worker_of(client, role)
        contacted.add(worker.worker_id)
        async with open_channel(worker.address) as channel, asyncio.timeout(LIMIT_S):
            outcome = await exchange(stub(channel), request, **command)
        assert outcome == (StatusCode.UNAUTHENTICATED, [])
        await until(partial(num_refused, deployment), partial(lt, before))
    states = {worker.worker_id: worker.state for worker in await client.workers()}
    assert {states.get(worker_id) for worker_id in contacted} == {"serving"}
    await client.complete([300, 301], GREEDY, timeout_s=LIMIT_S)


class ServerWithoutSecret(prefill_pb2_grpc.PrefillServicer):
    """A server that answers as a worker does, and keeps all that it receives."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.events: list[str] = []

    async def Connect(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self.events += [one.WhichOneof("command") for one in unpack_batch(request)]
            yield prefill_pb2.PrefillConnectResponse(
                welcome=worker_pb2.Welcome(
                    worker_id=self._member.member_id,
                    protocol_version=PROTOCOL_VERSION,
                    function_library=FUNCTION_LIBRARY,
                    pool_id=self._member.pool_id,
                    load=worker_pb2.WorkerLoad(num_free_slots=64),
                )
            )


async def listening(
    servicer: ServerWithoutSecret, stack: AsyncExitStack, port: int = 0, proves: Guard | None = None
) -> int:
    server = RpcServer(guard=proves)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server.aio)
    stack.push_async_callback(server.stop)
    return await server.start("127.0.0.1", port)


def store_of(deployment: Deployment) -> "redis.asyncio.Redis":
    (socket,) = deployment.run_root.glob("*/redis.sock")
    return redis.asyncio.Redis.from_url(f"unix://{socket}")


async def entry_of(store: "redis.asyncio.Redis", worker_id: str) -> tuple[bytes, Member]:
    raw = await store.get(f"{{quire}}:member:{worker_id}")
    assert isinstance(raw, bytes)
    values = json.loads(raw.partition(b" ")[2])
    values.pop("load")
    return raw, Member(**values)


async def test_a_forged_registry_entry_is_never_used(
    deployment: Deployment, client: AsyncClient
) -> None:
    """The entries are those that a process with access to Redis could write without the secret."""
    real = await worker_of(client, "prefill")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(store_of(deployment))
        raw, member = await entry_of(store, real.worker_id)
        ours = replace(member, member_id="prefill-0000forged")
        server = ServerWithoutSecret(ours)
        address = f"127.0.0.1:{await listening(server, stack)}"
        ours = replace(ours, address=address)
        another = replace(ours, member_id="prefill-0001forged")
        forged = {
            ours.member_id: json.dumps(asdict(ours)).encode(),
            another.member_id: encode(another, OTHER.registry_key).encode(),
            "prefill-0002forged": raw,
            "prefill-0003forged": raw.replace(member.address.encode(), address.encode()),
        }
        for name, entry in forged.items():
            await store.set(f"{{quire}}:member:{name}", entry)
            await store.sadd("{quire}:members", name)
        await asyncio.sleep(1.5)  # gateways look twice a second
        assert not forged.keys() & {worker.worker_id for worker in await client.workers()}
        await client.complete([300, 301], GREEDY, timeout_s=LIMIT_S)
        for name in forged:
            await store.delete(f"{{quire}}:member:{name}")
    assert server.events == []
    log = deployment.log.read_text()
    refused = [
        line for line in log.splitlines() if "member_refused" in line and '"gateway"' in line
    ]
    assert all(any(name in line for line in refused) for name in forged)


async def until_replaced(client: AsyncClient, gone: Worker) -> None:
    """Wait until another worker of the role serves, and the registry has dropped the old one's
    entry."""

    def is_replaced(workers: tuple[Worker, ...]) -> bool:
        found = [(w.state, w.worker_id != gone.worker_id) for w in workers if w.role == gone.role]
        return found == [("serving", True)]

    await until(client.workers, is_replaced)


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_replayed_entry_of_a_dead_worker_gets_a_hello_and_nothing_else(
    deployment: Deployment, client: AsyncClient, guarded: bool
) -> None:
    """A process takes over the port of a dead worker, and writes the dead worker's signed entry
    again and again. `guarded`: with another deployment's secret."""
    dead = await worker_of(client, "prefill")
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):
        store = await stack.enter_async_context(store_of(deployment))
        raw, member = await entry_of(store, dead.worker_id)
        await client.drain(dead.worker_id, force=True)
        await until(client.workers, lambda now: dead.worker_id not in {w.worker_id for w in now})
        server = ServerWithoutSecret(member)
        port = int(member.address.rpartition(":")[2])
        await listening(server, stack, port, guard(member.member_id) if guarded else None)
        for _ in range(6):
            await store.set(f"{{quire}}:member:{member.member_id}", raw, px=3000)
            await store.sadd("{quire}:members", member.member_id)
            await asyncio.sleep(0.5)
        await until_replaced(client, dead)
        await client.complete([300, 301], GREEDY, timeout_s=LIMIT_S)
    assert set(server.events) <= {"hello"}
    assert guarded or server.events
    outcome = "made with another secret" if guarded else "does not prove this deployment's secret"
    assert outcome in deployment.log.read_text()
