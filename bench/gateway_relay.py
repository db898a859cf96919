"""How many tokens a second one gateway process relays, how long a stream pauses, and CPU time.

    python -m bench.gateway_relay [--streams 64] [--tokens 512] [--step-ms 0] [--model DIR]
        [--over grpc http] [--guard none keys tls both] [--connections new kept]
        [--requests 1] [--rounds 3]

Three processes, as in life: fake workers that only count (one StepOutput a step, as fast as the
stream takes them), the gateway itself, and clients over gRPC or HTTP. Prints a row of a markdown
table for each round of each combination; rounds alternate, so that a slow moment of the machine
concerns all. `--guard`: API keys, TLS for clients, or both. `--connections`: whether each request
has a new connection, or one that is kept from an earlier request, as in the pools of clients.
`--requests`: how many each stream sends, one after another; those of all streams begin together.
"""

import asyncio
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from bench.counting_workers import SECRET, SPEC, member, run_workers
from bench.harness import options, table_head, table_row
from bench.load import GrpcTarget, HttpTarget, Record, Target, send_all
from bench.make_checkpoint import make_checkpoint
from blockstore.memory_store import MemoryStore
from blockstore.registry import Role
from quire.api_keys import hash_key
from quire.async_client import AsyncClient
from quire.certificates import write_certificates
from quire.connections import Tls
from quire.types import Sampling
from quire.v1 import inference_pb2_grpc
from services.gateway.access.guards import KeyGuard
from services.gateway.access.keyring import Keyring
from services.gateway.api import Generator
from services.gateway.config import PartOptions
from services.gateway.grpc.service import SERVICE_NAME, InferenceService
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.gateway.request.metrics import RequestMeters
from services.gateway.wiring import start_gateway
from services.runtime.logging import configure_logging
from services.runtime.metrics import KeyringMetrics
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import RpcServer
from tests.memory_registry import MemoryRegistry

KEY = "qk-of-the-benchmark-with-enough-characters"
HEADER = ("over", "guard", "connections", "streams", "requests each", "tokens each", "step, ms")
FIGURES = (
    "tokens/s",
    "tokens a message",
    "longest pause of a stream, ms",
    "gateway CPU, us/token",
    "tokens/CPU-s",
)


@dataclass(frozen=True)
class Options:
    streams: tuple[int, ...] = (64,)
    tokens: int = 512
    step_ms: float = 0.0
    """The time between two steps; 0 is as fast as it goes."""
    model: str | None = None
    """A directory with a tokenizer."""
    over: tuple[Literal["grpc", "http"], ...] = ("grpc",)
    guard: tuple[Literal["none", "keys", "tls", "both"], ...] = ("none",)
    connections: tuple[Literal["new", "kept"], ...] = ("new",)
    requests: int = 1
    rounds: int = 1


@dataclass(frozen=True)
class Case:
    """The case that one row measures."""

    num_streams: int
    over: str
    connections: str
    guard: str
    folder: Path
    """The directory of the certificates and of the file of API keys."""

    @property
    def keys(self) -> Path | None:
        return self.folder / "keys.json" if self.guard in ("keys", "both") else None

    @property
    def tls(self) -> TlsFiles | None:
        files = TlsFiles(self.folder / "gateway.crt", self.folder / "gateway.key")
        return files if self.guard in ("tls", "both") else None

    def target(self, port: int) -> Target:
        tls, address = Tls(self.folder / "ca.crt") if self.tls else None, f"127.0.0.1:{port}"
        if self.over == "http":
            url = f"{'https' if tls else 'http'}://{address}"
            return HttpTarget(url, SPEC.model, api_key=KEY, tls=tls)
        return GrpcTarget(AsyncClient(address, api_key=KEY, tls=tls), Sampling())


async def run_gateway(pipe: Connection, ports: list[int], model_dir: str, case: Case) -> None:
    """Sends its port; then its CPU seconds whenever it is asked."""
    configure_logging("gateway")  # a line for each request, as in life
    store, registry = MemoryStore(), MemoryRegistry()
    await store.register_pool(SPEC)
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role, port in zip(roles, ports, strict=True):
        entry = member(role, f"{role}-1", SPEC, model_dir, port, case.num_streams)
        await registry.announce(entry, ttl_s=1e6)
    metrics = RequestMeters(CollectorRegistry())
    async with start_gateway(store, registry, SECRET, PartOptions(), metrics) as assembly:
        while not assembly.gateway.ready():
            await assembly.changes.wait(assembly.changes.num_changes, 0.1)
        async with _listening(case, assembly.gateway) as port:
            pipe.send(port)
            while await asyncio.to_thread(pipe.recv):
                pipe.send(time.process_time())


@asynccontextmanager
async def _listening(case: Case, gateway: Generator) -> AsyncIterator[int]:
    ring = Keyring(case.keys, KeyringMetrics(CollectorRegistry())) if case.keys else None
    if case.over == "http":
        app = create_app(gateway, CollectorRegistry(), keyring=ring)
        async with http_server(app, "127.0.0.1", 0, tls=case.tls) as port:
            yield port
        return
    server = RpcServer(SERVICE_NAME, guard=KeyGuard(ring), tls=case.tls)
    service = InferenceService(gateway)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server.aio)
    yield await server.start("127.0.0.1", 0)
    await server.stop()


async def run_clients(
    port: int, case: Case, options: Options, cpu_s: Callable[[], float]
) -> tuple[list[Record], float, float]:
    """The records, the seconds that they took, and the CPU seconds of the gateway meanwhile. A
    request of each stream goes before. SystemExit: a request has failed."""
    target = case.target(port)
    await _send_round(target, case.num_streams, 8)
    records: list[Record] = []
    cpu, start = cpu_s(), time.perf_counter()
    for _ in range(options.requests):
        if case.connections == "new":
            await target.close()
            target = case.target(port)
        records += await _send_round(target, case.num_streams, options.tokens)
    elapsed, cpu = time.perf_counter() - start, cpu_s() - cpu
    await target.close()
    return records, elapsed, cpu


async def _send_round(target: Target, num_streams: int, num_tokens: int) -> list[Record]:
    """Streams that start together."""
    records = await send_all(target, ["count"] * num_streams, num_tokens)
    for record in records:
        if record.error:
            raise SystemExit(record.error)
    return records


def _child(
    run: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run, args=(run, theirs, arguments), daemon=True)
    process.start()
    return ours, process


def _run(run: Callable[..., Coroutine[Any, Any, None]], pipe: Connection, arguments: Any) -> None:
    asyncio.run(run(pipe, *arguments))


def measure(case: Case, options: Options, model_dir: str) -> str:
    """The row of a case."""
    workers, of_workers = _child(run_workers, case.num_streams, options.step_ms / 1000)
    gateway, of_gateway = _child(run_gateway, workers.recv(), model_dir, case)
    port = gateway.recv()

    def cpu_s() -> float:
        gateway.send(True)
        return float(gateway.recv())

    records, elapsed, cpu = asyncio.run(run_clients(port, case, options, cpu_s))
    for pipe, process in ((gateway, of_gateway), (workers, of_workers)):
        pipe.send(False)
        process.join()
    tokens = case.num_streams * options.requests * options.tokens
    messages = sum(len(record.arrivals) for record in records)
    pause_s = max((gap for record in records for gap in record.gaps_s), default=0.0)
    asked = (case.num_streams, options.requests, options.tokens, f"{options.step_ms:g}")
    figures = (
        f"{tokens / elapsed:,.0f}",
        f"{tokens / messages:.1f}",
        f"{pause_s * 1000:.0f}",
        f"{cpu / tokens * 1e6:.1f}",
        f"{tokens / cpu:,.0f}",
    )
    return table_row([case.over, case.guard, case.connections, *map(str, asked), *figures])


def main() -> None:
    asked = options(Options, __doc__)
    print(table_head([*HEADER, *FIGURES], num_texts=3))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = asked.model or str(make_checkpoint(folder / "model"))
        write_certificates(folder)
        keys = {"keys": [{"name": "bench", "hash": hash_key(KEY)}]}
        (folder / "keys.json").write_text(json.dumps(keys))
        for case in itertools.product(
            range(asked.rounds), asked.streams, asked.over, asked.connections, asked.guard
        ):
            print(measure(Case(*case[1:], folder), asked, model_dir), flush=True)


if __name__ == "__main__":
    main()
