"""How many tokens a second one gateway process relays, how long a stream pauses, and CPU time.

    python bench/gateway_relay.py [--streams 64] [--tokens 512] [--step-ms 0] [--model DIR]
        [--over grpc http] [--guard none keys tls both] [--connections new kept]
        [--requests 1] [--rounds 3]

Three processes, as in life: fake workers that only count (one StepOutput a step, as fast as the
stream takes them), the gateway itself, and clients over gRPC or HTTP. Prints a row of a markdown
table for each round of each combination; rounds alternate, so that a slow moment of the machine
concerns all. `--guard`: API keys, TLS for clients, or both. `--connections`: whether each request
has a new connection, or one that is kept from an earlier request, as in the pools of clients.
`--requests`: how many each stream sends, one after another; those of all streams begin together.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.counting_workers import SECRET, SPEC, member, run_workers
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
_HEADER = (
    "| over | guard | connections | streams | requests each | tokens each | step, ms | tokens/s "
    "| tokens a message | longest pause of a stream, ms | gateway CPU, us/token | tokens/CPU-s |"
)


@dataclass(frozen=True)
class Front:
    """The listener that the clients use: its protocol, its API keys and its TLS."""

    over: str
    guard: str
    tls: TlsFiles | None


async def run_gateway(
    pipe: Connection, ports: list[int], num_slots: int, model_dir: str, front: Front
) -> None:
    """Sends its port; then its CPU seconds whenever it is asked."""
    configure_logging("gateway")  # a line for each request, as in life
    store, registry = MemoryStore(), MemoryRegistry()
    await store.register_pool(SPEC)
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role, port in zip(roles, ports, strict=True):
        entry = member(role, f"{role}-1", SPEC, model_dir, port, num_slots)
        await registry.announce(entry, ttl_s=1e6)
    metrics = RequestMeters(CollectorRegistry())
    async with start_gateway(store, registry, SECRET, PartOptions(), metrics) as assembly:
        while not assembly.gateway.ready():
            await assembly.changes.wait(assembly.changes.num_changes, 0.1)
        async with _listening(front, assembly.gateway) as port:
            pipe.send(port)
            while await asyncio.to_thread(pipe.recv):
                usage = resource.getrusage(resource.RUSAGE_SELF)
                pipe.send(usage.ru_utime + usage.ru_stime)


@asynccontextmanager
async def _listening(front: Front, gateway: Generator) -> AsyncIterator[int]:
    ring = None
    if front.guard in ("keys", "both"):
        with tempfile.NamedTemporaryFile("w") as file:
            json.dump({"keys": [{"name": "bench", "hash": hash_key(KEY)}]}, file)
            file.flush()
            ring = Keyring(Path(file.name), KeyringMetrics(CollectorRegistry()))
    if front.over == "http":
        app = create_app(gateway, CollectorRegistry(), keyring=ring)
        async with http_server(app, "127.0.0.1", 0, tls=front.tls) as port:
            yield port
        return
    server = RpcServer(SERVICE_NAME, guard=KeyGuard(ring), tls=front.tls)
    service = InferenceService(gateway)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server.aio)
    yield await server.start("127.0.0.1", 0)
    await server.stop()


@dataclass(frozen=True)
class Clients:
    """Number of the streams, requests of each, and whether these keep connections."""

    num_streams: int
    num_requests: int
    num_tokens: int
    connections: str


async def run_clients(
    port: int, clients: Clients, front: Front, cpu_s: Callable[[], float]
) -> tuple[list[Record], float, float]:
    """The records, the seconds that they took, and the CPU seconds of the gateway meanwhile. A
    request of each stream goes before. SystemExit: a request has failed."""
    target = _target(port, front)
    await _send_round(target, clients.num_streams, 8)
    records: list[Record] = []
    cpu, start = cpu_s(), time.perf_counter()
    for _ in range(clients.num_requests):
        if clients.connections == "new":
            await target.close()
            target = _target(port, front)
        records += await _send_round(target, clients.num_streams, clients.num_tokens)
    elapsed, cpu = time.perf_counter() - start, cpu_s() - cpu
    await target.close()
    return records, elapsed, cpu


def _target(port: int, front: Front) -> Target:
    tls = Tls(front.tls.certificate.with_name("ca.crt")) if front.tls else None
    address = f"127.0.0.1:{port}"
    if front.over == "http":
        url = f"{'https' if tls else 'http'}://{address}"
        return HttpTarget(url, SPEC.model, api_key=KEY, tls=tls)
    return GrpcTarget(AsyncClient(address, api_key=KEY, tls=tls), Sampling())


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


def measure(clients: Clients, step_s: float, model_dir: str, front: Front) -> str:
    num_slots = clients.num_streams
    workers, of_workers = _child(run_workers, num_slots, step_s)
    gateway, of_gateway = _child(run_gateway, workers.recv(), num_slots, model_dir, front)
    port = gateway.recv()

    def cpu_s() -> float:
        gateway.send(True)
        return float(gateway.recv())

    records, elapsed, cpu = asyncio.run(run_clients(port, clients, front, cpu_s))
    for pipe, process in ((gateway, of_gateway), (workers, of_workers)):
        pipe.send(False)
        process.join()
    tokens = clients.num_streams * clients.num_requests * clients.num_tokens
    messages = sum(len(record.arrivals) for record in records)
    pause_s = max((gap for record in records for gap in record.gaps_s), default=0.0)
    return (
        f"| {front.over} | {front.guard} | {clients.connections} | {clients.num_streams} "
        f"| {clients.num_requests} | {clients.num_tokens} | {step_s * 1000:g} "
        f"| {tokens / elapsed:,.0f} | {tokens / messages:.1f} | {pause_s * 1000:.0f} "
        f"| {cpu / tokens * 1e6:.1f} | {tokens / cpu:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=0.0, help="0: as fast as it goes")
    parser.add_argument("--model", help="directory with a tokenizer")
    parser.add_argument("--over", choices=("grpc", "http"), nargs="+", default=["grpc"])
    parser.add_argument(
        "--guard", choices=("none", "keys", "tls", "both"), nargs="+", default=["none"]
    )
    parser.add_argument("--connections", choices=("new", "kept"), nargs="+", default=["new"])
    parser.add_argument("--requests", type=int, default=1, help="of each stream")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    print(_HEADER)
    print("|---|---|---|" + "---:|" * 9)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = arguments.model or str(make_checkpoint(Path(directory) / "model"))
        write_certificates(Path(directory) / "tls")
        files = TlsFiles(*(Path(directory) / "tls" / f"gateway.{kind}" for kind in ("crt", "key")))
        combinations = itertools.product(
            range(arguments.rounds),
            arguments.streams,
            arguments.over,
            arguments.connections,
            arguments.guard,
        )
        for _, num_streams, over, connections, guard in combinations:
            front = Front(over, guard, files if guard in ("tls", "both") else None)
            clients = Clients(num_streams, arguments.requests, arguments.tokens, connections)
            print(measure(clients, arguments.step_ms / 1000, model_dir, front), flush=True)


if __name__ == "__main__":
    main()
