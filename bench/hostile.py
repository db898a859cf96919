"""Measures what hostile clients cost a running deployment and its other clients.

    quire serve &
    python -m bench.hostile --pid PID_OF_THE_GATEWAY [--http-port 8000] [--grpc-port 50051]
        [--tokens 4 64]

Each attack runs in a process of its own for some seconds while a neighbour asks for a few tokens at
a time, or for as many as people do. Prints a markdown table: the neighbour's times alone and beside
each attack, and the gateway's resident memory at its peak so far.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from quire.bench.load import Load
from quire.bench.summary import distribution
from quire.bench.target import HttpTarget
from quire.bench.workload import Session, Turn

HOST = "127.0.0.1"
_ATTACKER = "127.0.0.2"
"""The attacker's address: without API keys the gateway tells clients apart by their addresses."""
_NICE = 19
"""Of the attacker, whose processor would be another one: beside a busy process on the same core it
gets 1.6 % of the core."""
BODY_BYTES = 16 * 1024 * 1024 - 256
_BODY = {"prompt": "A block table", "max_tokens": 200, "stream": True, "ignore_eos": True}
_GONE = (ConnectionError, asyncio.IncompleteReadError, TimeoutError, OSError)

Attack = Callable[[int, int, float], Awaitable[None]]
"""Takes the port, the number of connections or requests, and seconds."""


def _connect(port: int) -> Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return asyncio.open_connection(HOST, port, local_addr=(_ATTACKER, 0))


def _post(body: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )


async def _each(work: Callable[[], Awaitable[None]], number: int) -> None:
    """Runs `work` this often at the same time; a broken connection ends its work."""

    async def one() -> None:
        with suppress(*_GONE):
            await work()

    await asyncio.gather(*(one() for _ in range(number)))


async def compute(_port: int, _number: int, seconds: float) -> None:
    """Computes and sends nothing: what the CPU time of an attacker costs by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def idle(port: int, number: int, seconds: float) -> None:
    """Connections that send nothing, opened 500 at a time and held."""
    writers = []
    for _ in range(0, number, 500):
        opened = await asyncio.gather(
            *(_connect(port) for _ in range(min(500, number))),
            return_exceptions=True,
        )
        writers += [each[1] for each in opened if not isinstance(each, BaseException)]
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.transport.abort()


async def slow_loris(port: int, number: int, seconds: float) -> None:
    """Connections that send their headers byte by byte."""

    async def trickle() -> None:
        _, writer = await _connect(port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.5)
        writer.transport.abort()

    await _each(trickle, number)


async def endless_bodies(port: int, number: int, seconds: float) -> None:
    """Chunked bodies that never end, as fast as the server takes them."""
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"

    async def pour() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # again, when the server has refused
            with suppress(*_GONE):
                _, writer = await _connect(port)
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                writer.write(head + b'\r\n1\r\n"\r\n')
                while time.monotonic() < until:
                    writer.write(chunk)
                    await writer.drain()
                writer.transport.abort()
            await asyncio.sleep(0)

    await _each(pour, number)


async def cancel_storm(port: int, number: int, _seconds: float) -> None:
    """Three times: this many streams at once, which all leave at the first byte of the answer."""
    request = _post(json.dumps(_BODY).encode())

    async def leave() -> None:
        reader, writer = await _connect(port)
        writer.write(request)
        async with asyncio.timeout(20):
            await reader.read(1)
        writer.transport.abort()

    for _ in range(3):
        await _each(leave, number)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _field(prefix: bytes, *texts: bytes) -> bytes:
    return prefix + b"".join(bytes([len(text)]) + text for text in texts)


_HEADERS = (
    b"\x83\x86"  # HPACK's static table: POST, http
    + _field(b"\x04", b"/quire.v1.Inference/Generate")
    + _field(b"\x01", b"x")
    + _field(b"\x0f\x10", b"application/grpc")
    + _field(b"\x00", b"te", b"trailers")
)


async def rapid_reset(port: int, number: int, seconds: float) -> None:
    """HTTP/2: on each of 8 connections this many calls, each reset right after its headers."""

    async def reset() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # again, when the server has closed the connection
            with suppress(*_GONE):
                reader, writer = await _connect(port)
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
                for call in range(number):
                    stream = 2 * call + 1
                    cancel = _frame(3, 0, stream, (8).to_bytes(4, "big"))
                    writer.write(_frame(1, 4, stream, _HEADERS) + cancel)
                    if call % 100 == 0:
                        await writer.drain()
                        with suppress(TimeoutError):  # reads, so that the server can go on
                            await asyncio.wait_for(reader.read(1 << 16), 0.001)
                writer.transport.abort()
            await asyncio.sleep(0)

    await _each(reset, 8)


def _full(begin: str, item: str, end: str) -> bytes:
    """A whole body of one item."""
    number = (BODY_BYTES - len(begin) - len(end)) // (len(item) + 1)
    return (begin + ",".join([item] * number) + end).encode()


_IDS, _MESSAGES = '{"prompt": "x", "stop_token_ids": [', '{"messages": ['
_USER = '{"role": "user", "content": "<|im_end|>"}'
BODIES: dict[str, Callable[[], bytes]] = {
    "5 million empty stop_token_ids": lambda: _full(_IDS, '""', "]}"),
    "1.5 million unknown fields": lambda: _full('{"prompt": "x",', '"field": 0', "}"),
    "8 million token ids": lambda: _full('{"prompt": [', "0", "]}"),
    "5 million empty messages": lambda: _full(_MESSAGES, "{}", "]}"),
    "text of escapes": lambda: b'{"prompt": "' + b'\\"' * (BODY_BYTES // 2) + b'"}',
    # As much as passes the bounds.
    "786,000 stop_token_ids": lambda: (_IDS + ",".join(["1000"] * 786_000) + "]}").encode(),
    "16,000 messages": lambda: (_MESSAGES + ",".join([_USER] * 16_000) + "]}").encode(),
}


async def whole_bodies(make: Callable[[], bytes], port: int, _number: int, seconds: float) -> None:
    """One body over and over."""
    body, until = make(), time.monotonic() + seconds
    path = "chat/completions" if body.startswith(_MESSAGES.encode()) else "completions"
    transport = httpx.AsyncHTTPTransport(local_address=_ATTACKER)
    async with httpx.AsyncClient(timeout=300, trust_env=False, transport=transport) as client:
        while time.monotonic() < until:
            await client.post(f"http://{HOST}:{port}/v1/{path}", content=body.ljust(BODY_BYTES))


ATTACKS: dict[str, tuple[Attack, int, str]] = {
    "a process that only computes": (compute, 1, "http"),
    "10,000 idle connections": (idle, 10_000, "http"),
    "slow loris, 1,000 connections": (slow_loris, 1000, "http"),
    "endless bodies, 64 connections": (endless_bodies, 64, "http"),
    "cancel storm, 3 x 500 streams": (cancel_storm, 500, "http"),
    "HTTP/2 rapid reset, 8 connections": (rapid_reset, 10_000, "grpc"),
    **{name: (partial(whole_bodies, make), 1, "http") for name, make in BODIES.items()},
}
"""Name -> attack, its number, and the port that it attacks."""


def run_attack(name: str, ports: dict[str, int], seconds: float) -> None:
    if name == "none":
        time.sleep(seconds)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.nice(_NICE)
    attack, number, kind = ATTACKS[name]
    asyncio.run(attack(ports[kind], number, seconds))  # type: ignore[arg-type]


async def neighbour(url: str, process: multiprocessing.Process, num_tokens: int) -> str:
    """Asks while the attack runs, for at least 400 tokens and 20 answers; its times, as cells."""
    target = HttpTarget(url, "", fields={"temperature": 0, "ignore_eos": True})
    load = Load(target)
    at_least = max(20, 400 // num_tokens)

    def sessions() -> Iterator[Session]:
        while len(load.records) < at_least or process.is_alive():
            yield Session([Turn(lambda: "A block table", num_tokens)])

    await load.closed_loop(sessions(), 1, 0.0)
    await target.close()
    if load.num_failed:
        raise SystemExit(f"{load.num_failed} of the neighbour's requests failed")
    records = load.records
    whole = distribution(record.e2e_s for record in records) or {}
    first = distribution(record.ttft_s for record in records) or {}
    gaps = distribution(gap for record in records for gap in record.gaps_s) or {"p99": math.nan}
    times = whole["p50"], whole["p99"], first["p50"], first["p99"], gaps["p99"]
    return " | ".join([*(f"{time_ms:.1f}" for time_ms in times), str(load.num_done)])


def peak_mib(pid: int | None) -> str:
    if pid is None:
        return "-"
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return f"{int(peak.split()[1]) / 1024:.0f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=50051)
    parser.add_argument("--pid", type=int, help="of the gateway")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=[*ATTACKS])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4], help="of the neighbour's answers"
    )
    args = parser.parse_args()
    ports = {"http": args.http_port, "grpc": args.grpc_port}
    print("| tokens | attack | p50, ms | p99 | TTFT p50 | p99 | gap p99 | requests | peak, MiB |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for num_tokens in args.tokens:
        for name in ("none", *args.attacks):
            arguments = name, ports, args.seconds
            attacker = multiprocessing.Process(target=run_attack, args=arguments)
            attacker.start()
            cells = await neighbour(f"http://{HOST}:{args.http_port}", attacker, num_tokens)
            attacker.join()
            print(f"| {num_tokens} | {name} | {cells} | {peak_mib(args.pid)} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
