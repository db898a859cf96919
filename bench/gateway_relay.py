"""How many tokens a second one gateway process relays, how long a stream pauses, and CPU time.

    python bench/gateway_relay.py [--streams 64] [--tokens 512] [--step-ms 0] [--model DIR]
        [--over grpc http] [--guard none keys tls both] [--rounds 3]

Three processes, as in life: fake workers that only count (one StepOutput a step, as fast as the
stream takes them), the gateway itself, and clients over gRPC or HTTP. Prints a row of a markdown
table for each round of each combination; rounds alternate, so that a slow moment of the machine
concerns all. `--guard`: API keys, TLS for clients, or both.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blockstore.memory_registry import MemoryRegistry
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Member, Role
from blockstore.store import FUNCTION_LIBRARY
from quire.api_keys import hash_key
from quire.async_client import AsyncClient
from quire.bench.load import Load
from quire.bench.target import GrpcTarget, HttpTarget, Target
from quire.bench.workload import Session, Turn
from quire.certificates import write_certificates
from quire.connections import Tls
from quire.types import Sampling
from quire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    worker_pb2,
)
from services.common.rpc.message_batching import unpack_batch
from services.common.rpc.proof import Guard
from services.common.rpc.tls import TlsFiles
from services.common.rpc.transport import RpcServer
from services.common.runtime.metrics import KeyringMetrics
from services.common.runtime.secret import Secret
from services.gateway.access.control import AccessControl
from services.gateway.access.guards import KeyGuard
from services.gateway.access.keyring import Keyring
from services.gateway.config import GatewayOptions
from services.gateway.frontend.api import Generator
from services.gateway.frontend.http.app import create_app
from services.gateway.frontend.http.transport.server import http_server
from services.gateway.frontend.service import SERVICE_NAME, InferenceService
from services.gateway.request_metrics import RequestMetrics
from services.gateway.wiring import start_gateway
from services.protocol.version import PROTOCOL_VERSION

SPEC = PoolSpec("pool", "toy", "fingerprint", num_blocks=1 << 20, block_size=16, block_bytes=1)
SECRET = Secret(b"the secret of a deployment that is measured")
TOKEN = 97
KEY = "qk-of-the-benchmark-with-enough-characters"
_GOES_ON = sampling_pb2.FINISH_REASON_UNSPECIFIED
_HEADER = (
    "| over | guard | streams | tokens each | step, ms | tokens/s | tokens a message "
    "| longest pause of a stream, ms | gateway CPU, us/token | tokens/CPU-s |"
)


@dataclass(frozen=True)
class Front:
    """The listener that the clients use: its protocol, its API keys and its TLS."""

    over: str
    guard: str
    tls: TlsFiles | None

    @property
    def has_keys(self) -> bool:
        return self.guard in ("keys", "both")


def _welcome(worker_id: str, num_slots: int) -> worker_pb2.Welcome:
    return worker_pb2.Welcome(
        worker_id=worker_id,
        protocol_version=PROTOCOL_VERSION,
        function_library=FUNCTION_LIBRARY,
        pool_id=SPEC.pool_id,
        load=worker_pb2.WorkerLoad(num_free_slots=num_slots),
    )


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for together in requests:
        for request in unpack_batch(together):
            yield request


class CountingPrefill(prefill_pb2_grpc.PrefillServicer):
    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for request in _each(request_iterator):
            kind = request.WhichOneof("command")
            if kind == "hello":
                yield prefill_pb2.PrefillConnectResponse(welcome=_welcome("prefill-1", 0))
            elif kind == "submit":
                ticket = request.submit.ticket
                ticket.sequences[0].token_ids.append(TOKEN)
                ticket.sequences[0].block_ids.append(0)
                output = worker_pb2.SequenceOutput(
                    request_id=ticket.request_id,
                    attempt=ticket.attempt,
                    position=len(ticket.prompt_token_ids),
                    token_ids=(TOKEN,),
                )
                yield prefill_pb2.PrefillConnectResponse(
                    prefilled=prefill_pb2.Prefilled(ticket=ticket, outputs=[output])
                )


class CountingDecode(decode_pb2_grpc.DecodeServicer):
    """All sequences take a step when the stream has taken the last one; they start together."""

    def __init__(self, num_slots: int, step_s: float) -> None:
        self._num_slots = num_slots
        self._step_s = step_s
        self._left: dict[tuple[str, int], int] = {}
        self._lengths: dict[tuple[str, int], int] = {}
        self._admitted = asyncio.Event()

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        reading = asyncio.create_task(self._read(request_iterator, context))
        try:
            while True:
                await self._admitted.wait()
                self._admitted.clear()
                while self._left:
                    yield self._step()
                    await asyncio.sleep(self._step_s)
        finally:
            reading.cancel()

    async def _read(self, request_iterator: Any, context: Any) -> None:
        async for request in _each(request_iterator):
            kind = request.WhichOneof("command")
            if kind == "hello":
                welcome = _welcome("decode-1", self._num_slots)
                await context.write(decode_pb2.DecodeConnectResponse(welcome=welcome))
            elif kind == "reserve":
                reserved = decode_pb2.Reserved(
                    request_id=request.reserve.request_id,
                    attempt=request.reserve.attempt,
                    granted=True,
                )
                await context.write(decode_pb2.DecodeConnectResponse(reserved=reserved))
            elif kind == "admit":
                ticket = request.admit.ticket
                num_tokens = len(ticket.prompt_token_ids) + ticket.sampling.max_tokens
                key = ticket.request_id, ticket.attempt
                self._left[key] = ticket.sampling.max_tokens - 1
                self._lengths[key] = num_tokens
                if len(self._left) == self._num_slots:
                    self._admitted.set()

    def _step(self) -> decode_pb2.DecodeConnectResponse:
        outputs = []
        for (request_id, attempt), left in list(self._left.items()):
            last = left == 1
            outputs.append(
                worker_pb2.SequenceOutput(
                    request_id=request_id,
                    attempt=attempt,
                    position=self._lengths[request_id, attempt] - left,
                    token_ids=(TOKEN,),
                    finish_reason=sampling_pb2.FINISH_REASON_LENGTH if last else _GOES_ON,
                )
            )
            if last:
                del self._left[request_id, attempt]
            else:
                self._left[request_id, attempt] = left - 1
        return decode_pb2.DecodeConnectResponse(step=decode_pb2.StepOutput(outputs=outputs))


async def run_workers(pipe: Connection, num_slots: int, step_s: float) -> None:
    prefill, decode = (
        RpcServer(guard=Guard(SECRET.rpc_key, f"{role}-1")) for role in ("prefill", "decode")
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(CountingPrefill(), prefill.aio)
    decode_pb2_grpc.add_DecodeServicer_to_server(CountingDecode(num_slots, step_s), decode.aio)
    pipe.send([await server.start("127.0.0.1", 0) for server in (prefill, decode)])
    await asyncio.to_thread(pipe.recv)


async def run_gateway(
    pipe: Connection, ports: list[int], num_slots: int, model_dir: str, front: Front
) -> None:
    """Sends its port; then its CPU seconds whenever it is asked."""
    store, registry = MemoryStore(), MemoryRegistry()
    await store.register_pool(SPEC)
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role, port in zip(roles, ports, strict=True):
        await registry.announce(_member(role, port, num_slots, model_dir), ttl_s=1e6)
    request_metrics = RequestMetrics(CollectorRegistry())
    async with start_gateway(
        store, registry, SECRET, GatewayOptions(), request_metrics
    ) as assembly:
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
    if front.has_keys:
        text = json.dumps({"keys": [{"name": "bench", "hash": hash_key(KEY)}]})
        ring = Keyring(None, text, KeyringMetrics(CollectorRegistry()))
        gateway = AccessControl(gateway, ring)
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


def _member(role: Role, port: int, num_slots: int, model_dir: str) -> Member:
    return Member(
        member_id=f"{role}-1",
        role=role,
        address=f"127.0.0.1:{port}",
        state="serving",
        started_unix_ms=1,
        protocol_version=PROTOCOL_VERSION,
        pool_id=SPEC.pool_id,
        model=SPEC.model,
        model_dir=model_dir,
        max_model_len=1 << 20,
        max_num_seqs=num_slots,
    )


async def run_clients(port: int, num_streams: int, num_tokens: int, front: Front) -> Load:
    """Streams that start together. SystemExit: one has failed."""
    tls = Tls(front.tls.certificate.with_name("ca.crt")) if front.tls else None
    address = f"127.0.0.1:{port}"
    target: Target
    if front.over == "http":
        url = f"{'https' if tls else 'http'}://{address}"
        target = HttpTarget(url, SPEC.model, api_key=KEY, tls=tls)
    else:
        target = GrpcTarget(AsyncClient(address, api_key=KEY, tls=tls), SPEC.model, Sampling())
    load = Load(target)
    session = Session([Turn(lambda: "count", num_tokens)])
    await load.closed_loop(iter([session] * num_streams), num_streams, 0.0, None)
    await target.close()
    for record in load.records:
        if record.error or record.num_output_tokens != num_tokens:
            raise SystemExit(f"{record.num_output_tokens} of {num_tokens}: {record.message}")
    return load


def byte_model(directory: Path) -> str:
    """A checkpoint without weights: configuration and a tokenizer of the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = dict.fromkeys((*sizes, "intermediate_size"), 1) | {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 2,
        "vocab_size": 256,
        "max_position_embeddings": 1 << 20,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


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


def measure(num_streams: int, num_tokens: int, step_s: float, model_dir: str, front: Front) -> str:
    workers, of_workers = _child(run_workers, num_streams, step_s)
    gateway, of_gateway = _child(run_gateway, workers.recv(), num_streams, model_dir, front)
    port = gateway.recv()
    asyncio.run(run_clients(port, num_streams, 8, front))

    def cpu_s() -> float:
        gateway.send(True)
        return float(gateway.recv())

    cpu, start = cpu_s(), time.perf_counter()
    load = asyncio.run(run_clients(port, num_streams, num_tokens, front))
    elapsed, cpu = time.perf_counter() - start, cpu_s() - cpu
    for pipe, process in ((gateway, of_gateway), (workers, of_workers)):
        pipe.send(False)
        process.join()
    tokens = num_streams * num_tokens
    messages = sum(len(record.arrivals) for record in load.records)
    pause_s = max(gap for record in load.records for gap in record.gaps_s)
    return (
        f"| {front.over} | {front.guard} | {num_streams} | {num_tokens} | {step_s * 1000:g} "
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
    parser.add_argument("--model", help="directory with a tokenizer; default: one of bytes")
    parser.add_argument("--over", choices=("grpc", "http"), nargs="+", default=["grpc"])
    parser.add_argument(
        "--guard", choices=("none", "keys", "tls", "both"), nargs="+", default=["none"]
    )
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    print(_HEADER)
    print("|---|---|" + "---:|" * 8)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = arguments.model or byte_model(Path(directory))
        write_certificates(Path(directory) / "tls")
        files = TlsFiles(*(Path(directory) / "tls" / f"gateway.{kind}" for kind in ("crt", "key")))
        combinations = itertools.product(
            range(arguments.rounds), arguments.streams, arguments.over, arguments.guard
        )
        for _, num_streams, over, guard in combinations:
            front = Front(over, guard, files if guard in ("tls", "both") else None)
            step_s = arguments.step_ms / 1000
            print(measure(num_streams, arguments.tokens, step_s, model_dir, front), flush=True)


if __name__ == "__main__":
    main()
