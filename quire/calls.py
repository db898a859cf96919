"""The calls of the client library that have one answer, and what `Client` and `AsyncClient` have in
common. The two differ in how they wait: in a thread, or in an event loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from quire import messages
from quire.addresses import DEFAULT_ADDRESS
from quire.connections import Access, Connection, Connections, Tls
from quire.messages import Request
from quire.progress import RESUME_WINDOW_S, Progress
from quire.types import Embedding, PoolAudit, Scaled
from quire.v1.adapters_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from quire.v1.block_manager_pb2 import (
    AuditRequest,
    DrainWorkerRequest,
    ListPoolsRequest,
    ListWorkersRequest,
)
from quire.v1.inference_pb2 import ListModelsRequest
from quire.v1.supervisor_pb2 import ScaleRequest

T = TypeVar("T")

_TIMEOUT_S = 10.0
_ADAPTER_TIMEOUT_S = 60.0
"""The time limit of a call that reads an adapter's files."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call of one answer, by the names of a stub of `Connection` and of its method."""

    stub: str
    method: str
    request: Message
    read: Callable[[Any], T]
    """Makes the result of the response."""
    timeout_s: float | None = _TIMEOUT_S

    def start(self, connection: Connection) -> Any:
        """Returns the response, or for asyncio its awaitable."""
        method = getattr(getattr(connection, self.stub), self.method)
        return method(self.request, timeout=self.timeout_s)


def _is_serving(response: HealthCheckResponse) -> bool:
    return bool(response.status == HealthCheckResponse.SERVING)


IS_READY = Call("health", "Check", HealthCheckRequest(), _is_serving)
MODELS = Call("inference", "ListModels", ListModelsRequest(), messages.models)
POOLS = Call("block_manager", "ListPools", ListPoolsRequest(), messages.pools)
WORKERS = Call("block_manager", "ListWorkers", ListWorkersRequest(), messages.workers)


def embed(
    prompt: str | Sequence[int], dimensions: int | None, model: str, timeout_s: float | None
) -> Call[Embedding]:
    request = messages.embed_request(prompt, dimensions, model)
    return Call("inference", "Embed", request, messages.embedding, timeout_s)


def audit(pool_id: str, timeout_s: float) -> Call[tuple[PoolAudit, ...]]:
    request = AuditRequest(pool_id=pool_id)
    return Call("block_manager", "Audit", request, messages.audits, timeout_s)


def drain(worker_id: str, force: bool) -> Call[int]:
    request = DrainWorkerRequest(worker_id=worker_id, force=force)
    return Call("block_manager", "DrainWorker", request, lambda answer: int(answer.num_running))


def scale(num_prefill: int | None, num_decode: int | None, model: str) -> Call[Scaled]:
    request = ScaleRequest(num_prefill=num_prefill, num_decode=num_decode, model=model)
    return Call("supervisor", "Scale", request, messages.scaled)


def load_adapter(name: str, path: str, model: str) -> Call[str]:
    request = LoadAdapterRequest(name=name, path=path, model=model)
    return Call(
        "adapters", "LoadAdapter", request, lambda answer: str(answer.model), _ADAPTER_TIMEOUT_S
    )


def unload_adapter(name: str) -> Call[None]:
    return Call("adapters", "UnloadAdapter", UnloadAdapterRequest(name=name), lambda _: None)


class ClientBase:
    """The connections of a client, by the library `grpc` or `grpc.aio`."""

    _library: Any

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
        self._gateways = Connections(address, access, self._library)
        self._operations = self._gateways
        if operations:
            self._operations = Connections(operations, access, self._library)
        self._resume_window_s = resume_window_s

    @property
    def address(self) -> str:
        """The address of the gateway in use."""
        return self._gateways.current.address

    def _servers(self, call: Call[Any]) -> Connections:
        is_for_users = call.stub in ("inference", "health")
        return self._gateways if is_for_users else self._operations

    def _progress(self, request: Request, timeout_s: float | None) -> Progress:
        return Progress(request, timeout_s, len(self._gateways), self._resume_window_s)
