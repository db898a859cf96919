"""The client library: `Client` for threads and scripts, `AsyncClient` for asyncio.

Both talk to a gateway over gRPC and raise the errors of `quire.errors`.
"""

from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from quire import messages
from quire.errors import translated
from quire.messages import Request
from quire.types import Completion, Delta, Model, Pool, PoolAudit, Prompt, Sampling, Worker
from quire.v1.block_manager_pb2 import (
    AuditRequest,
    DrainWorkerRequest,
    ListPoolsRequest,
    ListWorkersRequest,
)
from quire.v1.block_manager_pb2_grpc import BlockManagerStub
from quire.v1.inference_pb2 import GenerateResponse, ListModelsRequest
from quire.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    # The generated stubs know them as types only: at run time one class serves both.
    from quire.v1.block_manager_pb2_grpc import BlockManagerAsyncStub
    from quire.v1.inference_pb2_grpc import InferenceAsyncStub

DEFAULT_ADDRESS = "127.0.0.1:50051"
OPERATIONS_TIMEOUT_S = 10.0
"""Limit of every call but `generate`, whose limit is the request's own."""

_MAX_MESSAGE_BYTES = 16 << 20
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A gateway is reached directly: an http_proxy in the environment is for the web.
    ("grpc.enable_http_proxy", 0),
    # A gateway whose machine vanished is noticed within 15 s; a dead process at once, by TCP.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each client has a connection of its own: one that is slow holds up none of the others.
    ("grpc.use_local_subchannel_pool", 1),
]


class _Call(Protocol):
    """What gRPC answers a streaming call with."""

    def __iter__(self) -> Iterator[GenerateResponse]: ...

    def cancel(self) -> object: ...


class Stream:
    """The deltas of one request, as they come. Leaving it early (`cancel`, or the end of its
    `with`) cancels the request at every hop."""

    def __init__(self, call: _Call, address: str) -> None:
        self._call = call
        self._address = address
        self._deltas = self._read()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def _read(self) -> Iterator[Delta]:
        with translated(self._address):
            for response in self._call:
                yield from messages.deltas(response)

    def cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """A connection to a gateway at `address` (host:port); safe to share between threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)
        self._block_manager = BlockManagerStub(self._channel)
        self._health = HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Stream:
        """Stream the answer to a text, token ids or a conversation."""
        return self.send(Request(prompt, sampling or Sampling(), model), timeout_s)

    def send(self, request: Request, timeout_s: float | None = None) -> Stream:
        """`generate` with everything that a request can say; `timeout_s` is its deadline."""
        message = messages.generate_request(request)
        return Stream(self._inference.Generate(message, timeout=timeout_s), self.address)

    def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer at once."""
        with self.generate(prompt, sampling, model=model, timeout_s=timeout_s) as stream:
            return messages.completion(list(stream))

    def is_ready(self) -> bool:
        """Whether the service at this address serves: a gateway, when every kind of worker is there
        for at least one model."""
        with translated(self.address):
            response = self._health.Check(HealthCheckRequest(), timeout=OPERATIONS_TIMEOUT_S)
        return bool(response.status == HealthCheckResponse.SERVING)

    def models(self) -> tuple[Model, ...]:
        """The models that are being served now."""
        with translated(self.address):
            response = self._inference.ListModels(ListModelsRequest(), timeout=OPERATIONS_TIMEOUT_S)
        return messages.models(response)

    def pools(self) -> tuple[Pool, ...]:
        with translated(self.address):
            response = self._block_manager.ListPools(
                ListPoolsRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.pools(response)

    def workers(self) -> tuple[Worker, ...]:
        with translated(self.address):
            response = self._block_manager.ListWorkers(
                ListWorkersRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.workers(response)

    def audit(self, pool_id: str = "", timeout_s: float = 60.0) -> tuple[PoolAudit, ...]:
        """Recount the references of one pool, or of all."""
        with translated(self.address):
            response = self._block_manager.Audit(AuditRequest(pool_id=pool_id), timeout=timeout_s)
        return messages.audits(response)

    def drain(self, worker_id: str) -> int:
        """Tell a worker to finish what it runs and exit; how many requests it still runs."""
        with translated(self.address):
            response = self._block_manager.DrainWorker(
                DrainWorkerRequest(worker_id=worker_id), timeout=OPERATIONS_TIMEOUT_S
            )
        return response.num_running

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio. Make it inside a running loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._inference: InferenceAsyncStub = InferenceStub(self._channel)
        self._block_manager: BlockManagerAsyncStub = BlockManagerStub(self._channel)
        self._health = HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer; closing the iterator (`aclosing`) cancels the request."""
        return self.send(Request(prompt, sampling or Sampling(), model), timeout_s)

    async def send(
        self, request: Request, timeout_s: float | None = None
    ) -> AsyncGenerator[Delta, None]:
        """`generate` with everything that a request can say; `timeout_s` is its deadline."""
        call = self._inference.Generate(messages.generate_request(request), timeout=timeout_s)
        try:
            with translated(self.address):
                async for response in call:
                    for delta in messages.deltas(response):
                        yield delta
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer at once."""
        stream = self.generate(prompt, sampling, model=model, timeout_s=timeout_s)
        return messages.completion([delta async for delta in stream])

    async def is_ready(self) -> bool:
        with translated(self.address):
            response = await self._health.Check(HealthCheckRequest(), timeout=OPERATIONS_TIMEOUT_S)
        return bool(response.status == HealthCheckResponse.SERVING)

    async def models(self) -> tuple[Model, ...]:
        with translated(self.address):
            response = await self._inference.ListModels(
                ListModelsRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.models(response)

    async def pools(self) -> tuple[Pool, ...]:
        with translated(self.address):
            response = await self._block_manager.ListPools(
                ListPoolsRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.pools(response)

    async def workers(self) -> tuple[Worker, ...]:
        with translated(self.address):
            response = await self._block_manager.ListWorkers(
                ListWorkersRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.workers(response)

    async def audit(self, pool_id: str = "", timeout_s: float = 60.0) -> tuple[PoolAudit, ...]:
        with translated(self.address):
            response = await self._block_manager.Audit(
                AuditRequest(pool_id=pool_id), timeout=timeout_s
            )
        return messages.audits(response)

    async def drain(self, worker_id: str) -> int:
        with translated(self.address):
            response = await self._block_manager.DrainWorker(
                DrainWorkerRequest(worker_id=worker_id), timeout=OPERATIONS_TIMEOUT_S
            )
        return response.num_running

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()
