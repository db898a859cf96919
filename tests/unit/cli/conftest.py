"""A gateway over real gRPC whose answers a test determines."""

import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from quire.v1 import block_manager_pb2 as bm
from quire.v1 import inference_pb2 as inference
from quire.v1.adapters_pb2 import LoadAdapterRequest, LoadAdapterResponse
from quire.v1.adapters_pb2_grpc import AdaptersServicer, add_AdaptersServicer_to_server
from quire.v1.block_manager_pb2_grpc import BlockManagerServicer, add_BlockManagerServicer_to_server
from quire.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from quire.v1.supervisor_pb2 import ScaleRequest, ScaleResponse, UpgradeRequest, UpgradeResponse
from quire.v1.supervisor_pb2_grpc import SupervisorServicer, add_SupervisorServicer_to_server


@dataclass
class FakeGateway(InferenceServicer, BlockManagerServicer, SupervisorServicer, AdaptersServicer):
    """Answers with its fields and records the requests."""

    address: str = ""
    responses: list[inference.GenerateResponse] = field(default_factory=list)
    refusal: tuple[grpc.StatusCode, str] | None = None
    is_away: bool = False
    endless: bool = False
    models: list[inference.Model] = field(default_factory=list)
    pools: list[bm.Pool] = field(default_factory=list)
    worker_lists: list[list[bm.Worker]] = field(default_factory=lambda: [[]])
    audits: list[bm.PoolAudit] = field(default_factory=list)
    scaled: ScaleResponse = field(default_factory=ScaleResponse)
    upgrades: list[UpgradeResponse] = field(default_factory=lambda: [UpgradeResponse()])
    stories: list[list[str]] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    authorizations: list[str | bytes | None] = field(default_factory=list)
    health: HealthServicer = field(default_factory=HealthServicer)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(
        self, request: inference.GenerateRequest, context: Any
    ) -> Iterator[inference.GenerateResponse]:
        self.requests.append(request)
        self._refuse(context)
        context.add_callback(self.cancelled.set)
        yield from self.responses
        if self.endless:
            self.cancelled.wait(timeout=20)

    def Explain(
        self, request: inference.ExplainRequest, context: grpc.ServicerContext
    ) -> inference.ExplainResponse:
        """Returns the sentences of the next story at each call; it is not found if it has none."""
        self.requests.append(request)
        if not (sentences := self.stories.pop(0)):
            context.abort(grpc.StatusCode.NOT_FOUND, "no record")
        return inference.ExplainResponse(sentences=sentences)

    def Embed(self, request: inference.EmbedRequest, context: Any) -> inference.EmbedResponse:
        self.requests.append(request)
        self._refuse(context)
        usage = inference.Usage(num_prompt_tokens=3)
        return inference.EmbedResponse(embedding=(0.5, -0.5), usage=usage)

    def ListModels(self, _request: Any, context: Any) -> inference.ListModelsResponse:
        self._refuse(context)
        return inference.ListModelsResponse(models=self.models)

    def ListPools(self, _request: Any, context: Any) -> bm.ListPoolsResponse:
        return bm.ListPoolsResponse(pools=self.pools)

    def ListWorkers(self, _request: Any, context: Any) -> bm.ListWorkersResponse:
        """Returns the next list at each call, and then the last one."""
        workers = self.worker_lists.pop(0) if len(self.worker_lists) > 1 else self.worker_lists[0]
        return bm.ListWorkersResponse(workers=workers)

    def WatchBlocks(self, _request: Any, context: Any) -> NoReturn:
        raise NotImplementedError

    def DescribeBlocks(self, _request: Any, context: Any) -> NoReturn:
        raise NotImplementedError

    def Audit(self, request: bm.AuditRequest, context: Any) -> bm.AuditResponse:
        self.requests.append(request)
        return bm.AuditResponse(pools=self.audits)

    def DrainWorker(self, request: bm.DrainWorkerRequest, context: Any) -> bm.DrainWorkerResponse:
        self.requests.append(request)
        self._refuse(context)
        return bm.DrainWorkerResponse(num_running=3)

    def Reload(self, request: bm.ReloadRequest, context: Any) -> bm.ReloadResponse:
        self.requests.append(request)
        self._refuse(context)
        return bm.ReloadResponse(worker_ids=[each.worker_id for each in self.worker_lists[0]])

    def Scale(self, request: ScaleRequest, context: Any) -> ScaleResponse:
        self.requests.append(request)
        self._refuse(context)
        return self.scaled

    def Upgrade(self, request: UpgradeRequest, context: Any) -> UpgradeResponse:
        """Returns the next state at each call, and then the last one."""
        self.requests.append(request)
        self._refuse(context)
        return self.upgrades.pop(0) if len(self.upgrades) > 1 else self.upgrades[0]

    def LoadAdapter(self, request: LoadAdapterRequest, context: Any) -> LoadAdapterResponse:
        self.requests.append(request)
        self._refuse(context)
        return LoadAdapterResponse(model="m")

    def UnloadAdapter(self, _request: Any, context: Any) -> NoReturn:
        raise NotImplementedError

    def refuse(self, status: grpc.StatusCode, text: str) -> None:
        """Refuse all further calls, as `services.runtime.rpc.transport` does."""
        self.refusal = status, text

    def _refuse(self, context: grpc.ServicerContext) -> None:
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        if self.is_away:  # as a proxy says of a gateway that is gone
            context.abort(grpc.StatusCode.UNAVAILABLE, "")
        if self.refusal is not None:
            context.set_trailing_metadata(
                (("quire-error-code", "some_code"), ("grpc-retry-pushback-ms", "1500"))
            )
            context.abort(*self.refusal)


def response(*texts: str, **fields: Any) -> inference.GenerateResponse:
    deltas = [inference.SequenceDelta(text=text, token_ids=[7]) for text in texts]
    return inference.GenerateResponse(request_id="r1", deltas=deltas, **fields)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterable[FakeGateway]:
    """A gateway that all commands of the test find, for requests and for operations."""
    fake = FakeGateway()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    add_InferenceServicer_to_server(fake, server)
    add_BlockManagerServicer_to_server(fake, server)
    add_SupervisorServicer_to_server(fake, server)
    add_AdaptersServicer_to_server(fake, server)
    fake.health.set("", HealthCheckResponse.SERVING)
    add_HealthServicer_to_server(fake.health, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("QUIRE_ADDRESS", fake.address)
    monkeypatch.setenv("QUIRE_OPERATIONS_ADDRESS", fake.address)
    yield fake
    fake.cancelled.set()
    server.stop(grace=None).wait(timeout=5)


Type = Callable[[str], None]


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Makes a text the standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def hello(gateway: FakeGateway) -> FakeGateway:
    """A gateway that answers "Hello, world" with a usage."""
    last = inference.SequenceDelta(
        text=" world", token_ids=[8, 9], finish_reason="FINISH_REASON_STOP", stop_token_id=9
    )
    usage = inference.Usage(
        num_prompt_tokens=20,
        num_cached_tokens=16,
        num_generated_tokens=3,
        time_to_first_token_ms=12.5,
    )
    gateway.responses = [
        response("Hello,"),
        inference.GenerateResponse(request_id="r1", deltas=[last], usage=usage),
    ]
    return gateway


@pytest.fixture
def samples(gateway: FakeGateway) -> FakeGateway:
    """A gateway that answers two samples side by side; the second ends first."""
    told: list[tuple[int, str, dict[str, Any]]] = [
        (0, "one", {}),
        (1, "eins", {}),
        (1, " zwei", {"finish_reason": "FINISH_REASON_STOP", "stop_string": "drei"}),
        (0, " two", {"finish_reason": "FINISH_REASON_LENGTH"}),
    ]
    gateway.responses = [
        inference.GenerateResponse(
            request_id="r1",
            deltas=[inference.SequenceDelta(index=index, text=text, token_ids=[7], **end)],
        )
        for index, text, end in told
    ]
    gateway.responses[-1].usage.num_generated_tokens = 4
    return gateway
