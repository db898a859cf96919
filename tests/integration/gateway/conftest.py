"""A gateway with fake workers on one pool of 256 blocks of 16 tokens."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from quire.v1 import inference_pb2_grpc
from services.gateway.access.guards import KeyGuard
from services.gateway.api import GenerationRequest, RequestedSampling
from services.gateway.config import PartOptions
from services.gateway.gateway import Gateway
from services.gateway.grpc.service import SERVICE_NAME, InferenceService
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.gateway.output.delta import Delta
from services.gateway.request.metrics import RequestMeters
from services.gateway.wiring import Wiring, start_gateway
from services.gateway.workers import directory as worker_directory
from services.runtime.rpc.transport import RpcServer, open_channel
from tests.memory_registry import MemoryRegistry
from tests.secret import SECRET
from tests.waiting import until

from .fakes import FakeDecode, FakePrefill, expected, member, start

LIMIT_S = 10.0
SPEC = PoolSpec("pool", "toy", "fingerprint", num_blocks=256, block_size=16, block_bytes=1)
PROMPT = tuple(b"paged attention")
TOKEN = "of 128 bits or more ..."
"""The resume token of new and of resumed requests."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


def write_model(directory: Path) -> None:
    """A Qwen3 with 300 tokens, the first 256 of which are bytes; a visible ASCII character is its
    own token id."""
    visible = {chr(code): code for code in range(ord("!"), ord("~") + 1)}
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - visible.keys())
    free = [code for code in range(256) if code not in visible.values()]
    vocab = visible | dict(zip(others, free, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 8,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "dtype": "float32",
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    said = "{% if m.name %}{{ m.name }}@{% endif %}{{ m.role }}:{{ m.content }}{{ mark }};"
    template = "{% for m in messages %}" + said + "{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


OPTIONS = PartOptions(poll_s=0.01, silence_s=5.0, client_priority=True, report_cached_tokens=True)


@dataclass
class GatewayHarness:
    """Fake workers, a gateway and its gRPC server in one process."""

    model_dir: Path
    stack: AsyncExitStack
    store: MemoryStore = field(default_factory=MemoryStore)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    request_metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    metrics: RequestMeters = field(init=False)
    workers: tuple[FakePrefill, FakeDecode] = field(init=False)
    """Those of the fixture `harness`."""
    assembly: Wiring = field(init=False)

    @property
    def gateway(self) -> Gateway:
        return self.assembly.gateway

    async def another(self) -> "GatewayHarness":
        """Another gateway for the same workers, with its own registry connection."""
        other = GatewayHarness(self.model_dir, self.stack, self.store)
        for one in await self.registry.members():
            await other.registry.announce(one, ttl_s=1e6)
        await other.assemble(OPTIONS)
        await until(lambda: other.connected() == self.connected())
        return other

    async def open(self, options: PartOptions) -> None:
        await self.store.register_pool(SPEC)
        await self.assemble(options)

    async def assemble(self, options: PartOptions) -> None:
        self.metrics = RequestMeters(self.request_metrics)
        self.assembly = await self.stack.enter_async_context(
            start_gateway(self.store, self.registry, SECRET, options, self.metrics)
        )

    async def add(self, *workers: FakePrefill | FakeDecode) -> None:
        """Start workers and wait until the gateway uses them."""
        for worker in workers:
            await self.announce(worker)
        ids = {worker.worker_id for worker in workers}
        await until(lambda: ids <= self.connected())

    async def announce(self, worker: FakePrefill | FakeDecode) -> RpcServer:
        server, address = await start(worker)
        self.stack.push_async_callback(server.stop)
        await self.registry.announce(member(worker, address, str(self.model_dir)), ttl_s=1e6)
        return server

    async def announce_starting(self, *workers: FakePrefill | FakeDecode) -> None:
        """Let the gateway see workers that load their model."""
        for worker in workers:
            loading = member(worker, "", str(self.model_dir))
            await self.registry.announce(replace(loading, state="starting", pool_id=""), ttl_s=1e6)
        ids = {worker.worker_id for worker in workers}
        await until(lambda: ids <= {one.member_id for one in self.assembly.directory.starting})

    async def lose_workers(self) -> None:
        """Lose the streams of all workers, which then consider this gateway dead."""
        for one in await self.registry.members():
            await self.registry.withdraw(one.member_id)
        await until(lambda: not self.connected())

    def connected(self) -> set[str]:
        served = self.assembly.directory.served("toy")
        pools = served.pools if served else ()
        return {worker.id for pool in pools for worker in (*pool.prefill, *pool.decode)}

    async def num_waiting(self, number: int) -> None:
        """Wait until so many requests are in the queue."""
        await until(lambda: self.assembly.dispatcher.num_waiting == number)

    async def listen(self, guard: KeyGuard | None = None) -> str:
        """The address of the gateway's own gRPC server."""
        server = RpcServer(SERVICE_NAME, guard=guard)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(self.gateway), server.aio
        )
        port = await server.start("127.0.0.1", 0)
        self.stack.push_async_callback(server.stop)
        return f"127.0.0.1:{port}"

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the gateway's own HTTP server."""
        app = create_app(self.gateway, self.request_metrics)
        async with http_server(app, "127.0.0.1", 0, grace_s=0) as port:
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
                yield client

    async def serve(self, guard: KeyGuard | None = None) -> "inference_pb2_grpc.InferenceAsyncStub":
        """A client of the gateway's own gRPC server."""
        channel: aio.Channel = open_channel(await self.listen(guard))
        self.stack.push_async_callback(channel.close)
        return inference_pb2_grpc.InferenceStub(channel)


class Call:
    """One request with the deltas received so far."""

    def __init__(self, gateway: Gateway, request: GenerationRequest) -> None:
        self.deltas: list[Delta] = []
        self.request = request
        self.task = asyncio.create_task(self._read(gateway))

    async def _read(self, gateway: Gateway) -> None:
        async with gateway.generate(self.request) as deltas:
            async for delta in deltas:
                self.deltas.append(delta)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    async def result(self) -> Delta:
        """The last delta. Raises the request's error."""
        async with asyncio.timeout(LIMIT_S):
            await self.task
        return self.deltas[-1]

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def finish(*calls: Call) -> None:
    """Wait for the ends of calls for eight tokens after PROMPT, and check the tokens."""
    for call in calls:
        await call.result()
        assert call.tokens == expected(PROMPT, 8)


async def read(gateway: Gateway, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
    """The deltas of a request, for a test that reads one by one."""
    async with gateway.generate(request) as deltas:
        async for delta in deltas:
            yield delta


def asked(request_id: str = "r1", max_tokens: int | None = 8, **fields: Any) -> GenerationRequest:
    sampling = RequestedSampling(
        temperature=0.0, max_tokens=max_tokens, **fields.pop("sampling", {})
    )
    fields = {"prompt": PROMPT, "resume_token": TOKEN} | fields
    return GenerationRequest(request_id=request_id, sampling=sampling, **fields)


@pytest.fixture(autouse=True)
def short_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that leaves the registry is soon disconnected."""
    monkeypatch.setattr(worker_directory, "ABSENT_S", 0.1)


@pytest.fixture
async def make_harness(model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def make(
            *workers: FakePrefill | FakeDecode, store: MemoryStore | None = None, **options: Any
        ) -> GatewayHarness:
            harness = GatewayHarness(model_dir, stack, store or MemoryStore())
            await harness.open(OPTIONS.model_copy(update=options))
            await harness.add(*workers)
            return harness

        yield make


@pytest.fixture
async def harness(make_harness: Callable[..., Any]) -> GatewayHarness:
    """A gateway with a worker of each kind."""
    workers = FakePrefill(), FakeDecode()
    made: GatewayHarness = await make_harness(*workers)
    made.workers = workers
    return made


@pytest.fixture
async def http(harness: GatewayHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with harness.http() as client:
        yield client
