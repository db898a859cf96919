"""The last messages of a worker arrive, however soon its process dies after them."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from grpc import aio

from blockstore.registry import Load
from quire.v1 import prefill_pb2, prefill_pb2_grpc
from services.protocol.messages import Began, Command, Submit
from services.protocol.ticket import SamplingParams, Ticket
from services.protocol.version import PROTOCOL_VERSION
from services.protocol.worker_stream import PREFILL
from services.runtime.rpc.message_batching import unpack_batch
from services.runtime.rpc.transport import RpcServer, open_channel
from services.worker.requests.events import Session
from services.worker.stream import StreamSession, WorkerStream

LIMIT_S = 30.0


class CrashingWorker:
    """A worker that is killed as soon as it begins to compute."""

    worker_id, pool_id = "worker", "pool"
    stream = PREFILL
    draining = False

    def __init__(self) -> None:
        self.drain_asked = asyncio.Event()
        self.sessions: set[Session] = set()
        self.role = self

    def load(self) -> Load:
        return Load()

    def execute(self, session: StreamSession, command: Command) -> None:
        assert isinstance(command, Submit)
        session.send(Began(*command.ticket.key), then=lambda: os.kill(os.getpid(), signal.SIGKILL))

    def close(self, session: StreamSession) -> None: ...


async def serve() -> None:
    server = RpcServer("quire.v1.Prefill")
    PREFILL.add(WorkerStream(cast(Any, CrashingWorker())), server.aio)
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()


async def requests() -> AsyncIterator[prefill_pb2.PrefillConnectRequest]:
    yield PREFILL.hello("gateway", PROTOCOL_VERSION)
    sampling = SamplingParams(0.0, 0, 1.0, 0.0, seed=0, max_tokens=1)
    yield PREFILL.command(
        Submit(
            Ticket(
                "r1",
                3,
                0,
                "h1",
                0,
                pool_id="pool",
                root_hash=b"r" * 16,
                prompt_token_ids=(1,),
                sampling=sampling,
            )
        )
    )
    await asyncio.Event().wait()


async def until_it_breaks(stream: Any, heard: list[Any]) -> None:
    with contextlib.suppress(aio.AioRpcError):
        async for message in stream:
            heard.append(message)


@pytest.mark.parametrize("time", range(4))
async def test_a_worker_reports_a_request_before_computing_it(time: int) -> None:
    """The worker is killed by the call that would start its engine."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    heard: list[prefill_pb2.PrefillConnectResponse] = []
    async with asyncio.timeout(LIMIT_S):
        port = int(await child.stdout.readline())
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stream = prefill_pb2_grpc.PrefillStub(channel).Connect(requests())
            await until_it_breaks(stream, heard)
        assert await child.wait() == -signal.SIGKILL
    each = [one for together in heard for one in unpack_batch(together)]
    began = [one.began for one in each if one.WhichOneof("event") == "began"]
    assert [(one.request_id, one.attempt) for one in began] == [("r1", 3)]


if __name__ == "__main__":
    asyncio.run(serve())
