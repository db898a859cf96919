"""The calls of the client library that have one answer, and what its clients share: `Client` waits
in a thread, `AsyncClient` in an event loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from quire import messages
from quire.addresses import DEFAULT_ADDRESS
from quire.connections import Connection, Connections, Tls
from quire.messages import Request
from quire.progress import RESUME_WINDOW_S, Progress
from quire.reports import Model, Pool, PoolAudit, Scaled, Upgrade, Worker
from quire.types import Embedding, Prompt, Sampling
from quire.v1.adapters_pb2 import LoadAdapterRequest, UnloadAdapterRequest
from quire.v1.block_manager_pb2 import (
    AuditRequest,
    DrainWorkerRequest,
    ListPoolsRequest,
    ListWorkersRequest,
    ReloadRequest,
)
from quire.v1.inference_pb2 import ListModelsRequest
from quire.v1.supervisor_pb2 import ScaleRequest, UpgradeRequest

S = TypeVar("S")
T = TypeVar("T")

_TIMEOUT_S = 10.0
_ADAPTER_TIMEOUT_S = 60.0
"""The time limit of a call that reads an adapter's files."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call with one answer: the name of a stub in `Connection`, and the name of its method."""

    stub: str
    method: str
    request: Message
    read: Callable[[Any], T]
    """Makes the result from the response."""
    timeout_s: float | None = _TIMEOUT_S

    def start(self, connection: Connection) -> Any:
        """Return the response, or for asyncio an awaitable of it."""
        method = getattr(getattr(connection, self.stub), self.method)
        return method(self.request, timeout=self.timeout_s)


def _is_serving(response: HealthCheckResponse) -> bool:
    return bool(response.status == HealthCheckResponse.SERVING)


# The methods of `Client` and `AsyncClient`, which make a result of each of these calls.


def is_ready(self: object) -> Call[bool]:
    """Return whether the service at this address serves. A gateway serves if at least one model has
    workers of both roles."""
    return Call("health", "Check", HealthCheckRequest(), _is_serving)


def models(self: object) -> Call[tuple[Model, ...]]:
    """Return the models that the gateway serves now."""
    return Call("inference", "ListModels", ListModelsRequest(), messages.each(Model, "models"))


def pools(self: object) -> Call[tuple[Pool, ...]]:
    """Return the pools of the deployment, with their counts of blocks."""
    return Call("block_manager", "ListPools", ListPoolsRequest(), messages.each(Pool, "pools"))


def workers(self: object) -> Call[tuple[Worker, ...]]:
    """Return the workers of the deployment, with their loads."""
    return Call("block_manager", "ListWorkers", ListWorkersRequest(), messages.workers)


def explain(self: object, about: str | Request) -> Call[tuple[str, ...]]:
    """Return the sentences about the request of this id, or about what would happen to a request
    now."""
    request = messages.explain_request(about)
    return Call("inference", "Explain", request, lambda answer: tuple(answer.sentences))


def embed(
    self: object,
    prompt: str | Sequence[int],
    dimensions: int | None = None,
    *,
    model: str = "",
    timeout_s: float | None = None,
) -> Call[Embedding]:
    """Return the embedding of a text or of token ids: all values or, for models that are trained
    for it, the first `dimensions`."""
    request = messages.embed_request(prompt, dimensions, model)
    return Call("inference", "Embed", request, messages.embedding, timeout_s)


def audit(self: object, pool_id: str = "", timeout_s: float = 60.0) -> Call[tuple[PoolAudit, ...]]:
    """Recount the block references of one pool; an empty `pool_id` means all pools."""
    request = AuditRequest(pool_id=pool_id)
    return Call("block_manager", "Audit", request, messages.each(PoolAudit, "pools"), timeout_s)


def drain(self: object, worker_id: str, *, force: bool = False) -> Call[int]:
    """Drain a worker: it takes no new work, its requests move or finish, then it exits.

    Returns the number of requests that it still runs. Draining the last worker of a role on a
    pool needs `force`.
    """
    request = DrainWorkerRequest(worker_id=worker_id, force=force)
    return Call("block_manager", "DrainWorker", request, lambda answer: int(answer.num_running))


def change_role(self: object, worker_id: str, role: str) -> Call[int]:
    """Let a worker take the other role, `prefill` or `decode`: it drains, and then serves on with
    its weights, its pool and its id.

    Returns the number of requests that it still runs. The last worker of a role on a pool keeps it.
    """
    request = DrainWorkerRequest(worker_id=worker_id, next_role=role)
    return Call("block_manager", "DrainWorker", request, lambda answer: int(answer.num_running))


def reload(self: object, model: str = "", timeout_s: float = 600.0) -> Call[tuple[str, ...]]:
    """Serve the weights that are at the model's path now, in the same processes; requests go on
    from their tokens. `model` may be empty if there is only one.

    Returns the ids of the workers once all serve the new weights; none if they did so before.
    Raises InvalidRequest, and changes nothing, if the weights cannot be served.
    """
    request = ReloadRequest(model=model)
    return Call(
        "block_manager", "Reload", request, lambda answer: tuple(answer.worker_ids), timeout_s
    )


def scale(
    self: object, *, num_prefill: int | None = None, num_decode: int | None = None, model: str = ""
) -> Call[Scaled]:
    """Let workers of a model in a `quire serve` take the other role, and start or drain the rest.
    None leaves a role as it is, but for idle workers that the other role takes. `model` may be
    empty if the run has only one.

    Returns before the workers have started, left or taken their role.
    """
    request = ScaleRequest(num_prefill=num_prefill, num_decode=num_decode, model=model)
    return Call("supervisor", "Scale", request, partial(messages.from_message, Scaled))


def upgrade(self: object, *, begin: bool = False) -> Call[Upgrade]:
    """Return how far the upgrade of a `quire serve` is, or its last one. `begin` begins one, unless
    one is going on."""
    request = UpgradeRequest(begin=begin)
    return Call("supervisor", "Upgrade", request, partial(messages.from_message, Upgrade))


def load_adapter(self: object, name: str, path: str, model: str = "") -> Call[str]:
    """Serve the LoRA adapter in the directory `path` of the servers as the model `name`.

    `model` is the model of the adapter; it may be empty if there is only one. Returns its name.
    """
    request = LoadAdapterRequest(name=name, path=path, model=model)
    return Call(
        "adapters", "LoadAdapter", request, lambda answer: str(answer.model), _ADAPTER_TIMEOUT_S
    )


def unload_adapter(self: object, name: str) -> Call[None]:
    """Take no new requests for a LoRA adapter."""
    return Call("adapters", "UnloadAdapter", UnloadAdapterRequest(name=name), lambda _: None)


class ClientBase(Generic[S]):
    """The connections of a client with streams of kind S, over `_library`: `grpc` or `grpc.aio`."""

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
        self._gateways = Connections(address, api_key, tls, self._library)
        self._operations = self._gateways
        if operations:
            self._operations = Connections(operations, api_key, tls, self._library)
        self._resume_window_s = resume_window_s

    def send(self, request: Request, timeout_s: float | None = None) -> S:
        raise NotImplementedError

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> S:
        """Stream the answer to a text, token ids or a conversation."""
        return self.send(Request(prompt, sampling or Sampling(), model), timeout_s)

    @property
    def address(self) -> str:
        """The address of the gateway in use."""
        return self._gateways.current.address

    def _servers(self, call: Call[Any]) -> Connections:
        is_for_users = call.stub in ("inference", "health")
        return self._gateways if is_for_users else self._operations

    def _progress(self, request: Request, timeout_s: float | None) -> Progress:
        return Progress(request, timeout_s, len(self._gateways), self._resume_window_s)
