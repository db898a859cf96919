"""The client library for threads and scripts; `quire.async_client` has the one for asyncio.

Both call a gateway over gRPC and raise the errors of `quire.errors`.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from quire import messages
from quire.connections import Access, Connection, Connections, Tls
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
from quire.v1.inference_pb2 import GenerateResponse, ListModelsRequest
from quire.v1.supervisor_pb2 import ScaleRequest

DEFAULT_ADDRESS = "127.0.0.1:50051"
CALL_TIMEOUT_S = 10.0
"""Time limit of each call other than `generate`, which takes its limit from the request, and
`audit`, which has a parameter for it."""

ADAPTER_TIMEOUT_S = 60.0
"""Of a call that reads an adapter's files."""


class _Call(Protocol):
    """The object that gRPC returns for a streaming call."""

    def __iter__(self) -> Iterator[GenerateResponse]: ...

    def cancel(self) -> object: ...


class Stream:
    """Iterates over the deltas of one request as they arrive.

    If the gateway goes away, the stream resumes at the next gateway. `cancel`, or the end of the
    stream's `with` block, cancels an unfinished request at every hop.
    """

    def __init__(self, gateways: Connections[Connection], progress: Progress) -> None:
        self._gateways = gateways
        self._progress = progress
        self._cancelled = False
        self._connection, self._call = self._begin()
        self._deltas = self._read()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def _begin(self) -> tuple[Connection, _Call]:
        connection, progress = self._gateways.current, self._progress
        return connection, connection.inference.Generate(
            progress.message(), timeout=progress.timeout_s()
        )

    def _read(self) -> Iterator[Delta]:
        while True:
            try:
                with translate_errors(self._connection.address):
                    for response in self._call:
                        self._progress.record_response(response)
                        yield from messages.deltas(response)
                return
            except QuireError as error:
                if self._cancelled:
                    raise
                pause_s = self._progress.record_break(error)
                if pause_s is None:
                    return
            self._gateways.switch_from(self._connection)
            time.sleep(pause_s)
            self._connection, self._call = self._begin()

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client:
    """A connection to a gateway at `address` (host:port), or to several gateways of one deployment
    (host:port,host:port).

    The client uses one gateway at a time, and the next one when a stream to it breaks. A broken
    stream resumes at another gateway, or at the same one if it returns within `resume_window_s`.
    Threads may share a client.

    `pools`, `workers`, `audit`, `drain` and `scale` are operations. A gateway serves them at a
    separate address, `operations` (unix:PATH or host:port). Without it they are called at
    `address`, where a gateway with API keys serves them to operators' keys.

    `api_key`: sent with each call. `tls`: for addresses other than unix:PATH; None: no TLS.
    """

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
        self._gateways = Connections(address, Connection, access)
        self._operations = (
            Connections(operations, Connection, access) if operations else self._gateways
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
    ) -> Stream:
        """Stream the answer to a text, token ids or a conversation."""
        return self.send(Request(prompt, sampling or Sampling(), model), timeout_s)

    def send(self, request: Request, timeout_s: float | None = None) -> Stream:
        """`generate` with every field of a request. `timeout_s`: the request's time limit."""
        progress = Progress(request, timeout_s, len(self._gateways), self._resume_window_s)
        return Stream(self._gateways, progress)

    def complete(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """Wait for the whole answer, with `sampling.n` sequences."""
        with self.generate(prompt, sampling, model=model, timeout_s=timeout_s) as stream:
            return messages.completion(list(stream))

    def embed(
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
            return messages.embedding(gateway.inference.Embed(request, timeout=timeout_s))

    def is_ready(self) -> bool:
        """Whether the service at this address serves. A gateway serves when at least one model has
        workers of both roles."""
        with self._gateways.use_current() as gateway:
            response = gateway.health.Check(HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        return bool(response.status == HealthCheckResponse.SERVING)

    def models(self) -> tuple[Model, ...]:
        """The models that the gateway serves now."""
        with self._gateways.use_current() as gateway:
            response = gateway.inference.ListModels(ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        return messages.models(response)

    def pools(self) -> tuple[Pool, ...]:
        with self._operations.use_current() as gateway:
            response = gateway.block_manager.ListPools(ListPoolsRequest(), timeout=CALL_TIMEOUT_S)
        return messages.pools(response)

    def workers(self) -> tuple[Worker, ...]:
        with self._operations.use_current() as gateway:
            response = gateway.block_manager.ListWorkers(
                ListWorkersRequest(), timeout=CALL_TIMEOUT_S
            )
        return messages.workers(response)

    def audit(self, pool_id: str = "", timeout_s: float = 60.0) -> tuple[PoolAudit, ...]:
        """Recount the block references of one pool; an empty `pool_id` means all pools."""
        with self._operations.use_current() as gateway:
            response = gateway.block_manager.Audit(AuditRequest(pool_id=pool_id), timeout=timeout_s)
        return messages.audits(response)

    def drain(self, worker_id: str, *, force: bool = False) -> int:
        """Drain a worker: it takes no new work, its requests move or finish, then it exits.

        Returns the number of requests that it still runs. Draining the last worker of a role on a
        pool needs `force`.
        """
        with self._operations.use_current() as gateway:
            response = gateway.block_manager.DrainWorker(
                DrainWorkerRequest(worker_id=worker_id, force=force), timeout=CALL_TIMEOUT_S
            )
        return int(response.num_running)

    def scale(
        self, *, num_prefill: int | None = None, num_decode: int | None = None, model: str = ""
    ) -> Scaled:
        """Let `quire serve` start or drain workers of a model; None leaves a role as it is.
        `model`: may be empty if the run has only one.

        Returns before the workers have started or left.
        """
        request = ScaleRequest(num_prefill=num_prefill, num_decode=num_decode, model=model)
        with self._operations.use_current() as gateway:
            response = gateway.supervisor.Scale(request, timeout=CALL_TIMEOUT_S)
        return messages.scaled(response)

    def load_adapter(self, name: str, path: str, model: str = "") -> str:
        """Serve the LoRA adapter in the directory `path` of the servers as the model `name`.

        `model`: the model that it is for; "": the only one. Returns that model's name.
        """
        request = LoadAdapterRequest(name=name, path=path, model=model)
        with self._operations.use_current() as gateway:
            response = gateway.adapters.LoadAdapter(request, timeout=ADAPTER_TIMEOUT_S)
        return str(response.model)

    def unload_adapter(self, name: str) -> None:
        """Take no new requests for a LoRA adapter."""
        with self._operations.use_current() as gateway:
            gateway.adapters.UnloadAdapter(UnloadAdapterRequest(name=name), timeout=CALL_TIMEOUT_S)

    def close(self) -> None:
        for connection in (*self._gateways, *self._operations):
            connection.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
