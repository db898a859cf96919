"""The client library for threads and scripts; `quire.async_client` has the one for asyncio.

Both call a gateway over gRPC and raise the errors of `quire.errors`.
"""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from quire import messages
from quire.errors import QuireError, translated
from quire.links import Link, Links
from quire.messages import Request
from quire.progress import RESUME_WINDOW_S, Progress
from quire.types import Completion, Delta, Model, Pool, PoolAudit, Prompt, Sampling, Scaled, Worker
from quire.v1.block_manager_pb2 import (
    AuditRequest,
    DrainWorkerRequest,
    ListPoolsRequest,
    ListWorkersRequest,
)
from quire.v1.inference_pb2 import GenerateResponse, ListModelsRequest
from quire.v1.supervisor_pb2 import ScaleRequest

DEFAULT_ADDRESS = "127.0.0.1:50051"
OPERATIONS_TIMEOUT_S = 10.0
"""Time limit of each call other than `generate`, which takes its limit from the request, and
`audit`, which has a parameter for it."""


class _Call(Protocol):
    """The object that gRPC returns for a streaming call."""

    def __iter__(self) -> Iterator[GenerateResponse]: ...

    def cancel(self) -> object: ...


class Stream:
    """Iterates over the deltas of one request as they arrive.

    If the gateway goes away, the stream resumes at the next gateway. `cancel`, or the end of the
    stream's `with` block, cancels an unfinished request at every hop.
    """

    def __init__(self, links: Links[Link], progress: Progress) -> None:
        self._links = links
        self._progress = progress
        self._cancelled = False
        self._link, self._call = self._begin()
        self._deltas = self._read()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def _begin(self) -> tuple[Link, _Call]:
        link, progress = self._links.current, self._progress
        return link, link.inference.Generate(progress.message(), timeout=progress.timeout_s())

    def _read(self) -> Iterator[Delta]:
        while True:
            try:
                with translated(self._link.address):
                    for response in self._call:
                        self._progress.saw(response)
                        yield from messages.deltas(response)
                return
            except QuireError as error:
                if self._cancelled:
                    raise
                pause_s = self._progress.broke(error)
                if pause_s is None:
                    return
            self._links.leave(self._link)
            time.sleep(pause_s)
            self._link, self._call = self._begin()

    def cancel(self) -> None:
        self._cancelled = True
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
    """A connection to a gateway at `address` (host:port), or to several gateways of one deployment
    (host:port,host:port).

    The client uses one gateway at a time, and the next one when a stream to it breaks. A broken
    stream resumes at another gateway, or at the same one if it returns within `resume_window_s`.
    Threads may share a client.

    `pools`, `workers`, `audit`, `drain` and `scale` are operations. A gateway serves them at a
    separate address, `operations` (unix:PATH or host:port); without it, `address` must be the
    address for operations.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        resume_window_s: float = RESUME_WINDOW_S,
        operations: str | None = None,
    ) -> None:
        self._links = Links(address, Link)
        self._operations = Links(operations, Link) if operations else self._links
        self._resume_window_s = resume_window_s

    @property
    def address(self) -> str:
        """The address of the gateway in use."""
        return self._links.current.address

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
        progress = Progress(request, timeout_s, len(self._links), self._resume_window_s)
        return Stream(self._links, progress)

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

    def is_ready(self) -> bool:
        """Whether the service at this address serves. A gateway serves when at least one model has
        workers of both roles."""
        with translated(self.address):
            response = self._links.current.health.Check(
                HealthCheckRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return bool(response.status == HealthCheckResponse.SERVING)

    def models(self) -> tuple[Model, ...]:
        """The models that the gateway serves now."""
        with translated(self.address):
            response = self._links.current.inference.ListModels(
                ListModelsRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.models(response)

    def pools(self) -> tuple[Pool, ...]:
        with translated(self._operations.current.address):
            response = self._operations.current.block_manager.ListPools(
                ListPoolsRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.pools(response)

    def workers(self) -> tuple[Worker, ...]:
        with translated(self._operations.current.address):
            response = self._operations.current.block_manager.ListWorkers(
                ListWorkersRequest(), timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.workers(response)

    def audit(self, pool_id: str = "", timeout_s: float = 60.0) -> tuple[PoolAudit, ...]:
        """Recount the block references of one pool; an empty `pool_id` means all pools."""
        with translated(self._operations.current.address):
            response = self._operations.current.block_manager.Audit(
                AuditRequest(pool_id=pool_id), timeout=timeout_s
            )
        return messages.audits(response)

    def drain(self, worker_id: str, *, force: bool = False) -> int:
        """Drain a worker: it takes no new work, its requests move or finish, then it exits.

        Returns the number of requests that it still runs. Draining the last worker of a role on a
        pool needs `force`.
        """
        with translated(self._operations.current.address):
            response = self._operations.current.block_manager.DrainWorker(
                DrainWorkerRequest(worker_id=worker_id, force=force), timeout=OPERATIONS_TIMEOUT_S
            )
        return response.num_running

    def scale(self, *, num_prefill: int | None = None, num_decode: int | None = None) -> Scaled:
        """Let `quire serve` start or drain workers; None leaves a role as it is.

        Returns before the workers have started or left.
        """
        request = ScaleRequest(num_prefill=num_prefill, num_decode=num_decode)
        with translated(self._operations.current.address):
            response = self._operations.current.supervisor.Scale(
                request, timeout=OPERATIONS_TIMEOUT_S
            )
        return messages.scaled(response)

    def close(self) -> None:
        for link in (*self._links, *self._operations):
            link.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
