"""The client library for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from quire import messages
from quire.client import ADAPTER_TIMEOUT_S, CALL_TIMEOUT_S, DEFAULT_ADDRESS
from quire.connections import Access, AsyncConnection, Connections, Tls
from quire.errors import QuireError, translate_errors
from quire.messages import Request
from quire.progress import RESUME_WINDOW_S, Progress
from quire.types import (
    Completion,
    Delta,
    Embedding,
    Model,
    Pool,
    PoolAudit,
    Prompt,
    Sampling,
    Scaled,
    Worker,
)
from quire.v1.adapters_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from quire.v1.block_manager_pb2 import (
    AuditRequest,
    DrainWorkerRequest,
    ListPoolsRequest,
    ListWorkersRequest,
)
from quire.v1.inference_pb2 import ListModelsRequest
from quire.v1.supervisor_pb2 import ScaleRequest


class AsyncClient:
    """`Client` for asyncio. Create it inside a running event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        resume_window_s: float = RESUME_WINDOW_S,
        operations: str | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        access = Access(api_key, tls)
        self._gateways = Connections(address, AsyncConnection, access)
        self._operations = (
            Connections(operations, AsyncConnection, access) if operations else self._gateways
        )
        self._resume_window_s = resume_window_s

    @property
    def address(self) -> str:
        """The address of the gateway in use."""
        return self._gateways.current.address

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
        """`generate` with every field of a request. `timeout_s`: the request's time limit."""
        progress = Progress(request, timeout_s, len(self._gateways), self._resume_window_s)
        while True:
            connection = self._gateways.current
            call = connection.inference.Generate(progress.message(), timeout=progress.timeout_s())
            try:
                with translate_errors(connection.address):
                    async for response in call:
                        progress.record_response(response)
                        for delta in messages.deltas(response):
                            yield delta
                return
            except QuireError as error:
                pause_s = progress.record_break(error)
                if pause_s is None:
                    return
            finally:
                call.cancel()
            self._gateways.switch_from(connection)
            await asyncio.sleep(pause_s)

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """Wait for the whole answer, with `sampling.n` sequences."""
        stream = self.generate(prompt, sampling, model=model, timeout_s=timeout_s)
        return messages.completion([delta async for delta in stream])

    async def embed(
        self,
        prompt: str | Sequence[int],
        dimensions: int | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Embedding:
        """The embedding of a text or of token ids. `dimensions`: the first so many values, for
        models that are trained for it; None: all."""
        request = messages.embed_request(prompt, dimensions, model)
        with self._gateways.use_current() as gateway:
            return messages.embedding(await gateway.inference.Embed(request, timeout=timeout_s))

    async def is_ready(self) -> bool:
        with self._gateways.use_current() as gateway:
            response = await gateway.health.Check(HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        return bool(response.status == HealthCheckResponse.SERVING)

    async def models(self) -> tuple[Model, ...]:
        with self._gateways.use_current() as gateway:
            response = await gateway.inference.ListModels(
                ListModelsRequest(), timeout=CALL_TIMEOUT_S
            )
        return messages.models(response)

    async def pools(self) -> tuple[Pool, ...]:
        with self._operations.use_current() as gateway:
            response = await gateway.block_manager.ListPools(
                ListPoolsRequest(), timeout=CALL_TIMEOUT_S
            )
        return messages.pools(response)

    async def workers(self) -> tuple[Worker, ...]:
        with self._operations.use_current() as gateway:
            response = await gateway.block_manager.ListWorkers(
                ListWorkersRequest(), timeout=CALL_TIMEOUT_S
            )
        return messages.workers(response)

    async def audit(self, pool_id: str = "", timeout_s: float = 60.0) -> tuple[PoolAudit, ...]:
        with self._operations.use_current() as gateway:
            response = await gateway.block_manager.Audit(
                AuditRequest(pool_id=pool_id), timeout=timeout_s
            )
        return messages.audits(response)

    async def drain(self, worker_id: str, *, force: bool = False) -> int:
        with self._operations.use_current() as gateway:
            response = await gateway.block_manager.DrainWorker(
                DrainWorkerRequest(worker_id=worker_id, force=force), timeout=CALL_TIMEOUT_S
            )
        return response.num_running

    async def scale(
        self, *, num_prefill: int | None = None, num_decode: int | None = None, model: str = ""
    ) -> Scaled:
        request = ScaleRequest(num_prefill=num_prefill, num_decode=num_decode, model=model)
        with self._operations.use_current() as gateway:
            response = await gateway.supervisor.Scale(request, timeout=CALL_TIMEOUT_S)
        return messages.scaled(response)

    async def load_adapter(self, name: str, path: str, model: str = "") -> str:
        request = LoadAdapterRequest(name=name, path=path, model=model)
        with self._operations.use_current() as gateway:
            response = await gateway.adapters.LoadAdapter(request, timeout=ADAPTER_TIMEOUT_S)
        return response.model

    async def unload_adapter(self, name: str) -> None:
        request = UnloadAdapterRequest(name=name)
        with self._operations.use_current() as gateway:
            await gateway.adapters.UnloadAdapter(request, timeout=CALL_TIMEOUT_S)

    async def close(self) -> None:
        for connection in (*self._gateways, *self._operations):
            await connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
