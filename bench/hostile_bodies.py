"""What hostile requests cost a running deployment, and its other clients.

    quire serve &
    python -m bench.hostile_bodies [--pid PID of the gateway]

One client sends bodies of 16 MiB over and over; a neighbour asks for a few tokens at a time. Prints
a markdown table: the time to each hostile answer, the neighbour's 99th percentile, and with `--pid`
the gateway's peak of resident memory.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

BODY_BYTES = 16 * 1024 * 1024 - 256
NEIGHBOUR = {"prompt": "A block table", "max_tokens": 4, "temperature": 0}


def full(begin: str, item: str, end: str) -> bytes:
    """A whole body of one item."""
    number = (BODY_BYTES - len(begin) - len(end)) // (len(item) + 1)
    return (begin + ",".join([item] * number) + end).encode()


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, endpoint and body."""
    text, chat = "completions", "chat/completions"
    ids, messages = '{"prompt": "x", "stop_token_ids": [', '{"messages": ['
    yield "5 million empty stop_token_ids", text, full(ids, '""', "]}")
    yield "1.5 million unknown fields", text, full('{"prompt": "x",', '"field": 0', "}")
    yield "8 million token ids", text, full('{"prompt": [', "0", "]}")
    yield "5 million empty messages", chat, full(messages, "{}", "]}")
    yield "text of escapes", text, b'{"prompt": "' + b'\\"' * (BODY_BYTES // 2) + b'"}'
    # As much as passes the bounds.
    number = ",".join(str(1000 + each) for each in range(786_000))
    yield "786,000 stop_token_ids", text, f"{ids}{number}]}}".ljust(BODY_BYTES).encode()
    message = '{"role": "user", "content": "<|im_end|>"}'
    honest = messages + ",".join([message] * 16_000) + "]}"
    yield "16,000 messages", chat, honest.ljust(BODY_BYTES).encode()


async def neighbour(client: httpx.AsyncClient, stop: asyncio.Event) -> list[float]:
    """Seconds of each request, at least 100 of them."""
    seconds: list[float] = []
    while len(seconds) < 100 or not stop.is_set():
        began = time.perf_counter()
        answer = await client.post("/v1/completions", json=NEIGHBOUR)
        answer.raise_for_status()
        seconds.append(time.perf_counter() - began)
    return seconds


async def attack(
    client: httpx.AsyncClient, path: str, body: bytes, num_requests: int
) -> tuple[int, list[float]]:
    seconds: list[float] = []
    status = 0
    for _ in range(num_requests):
        began = time.perf_counter()
        answer = await client.post(f"/v1/{path}", content=body)
        status = answer.status_code
        seconds.append(time.perf_counter() - began)
    return status, seconds


def p99_ms(seconds: list[float]) -> str:
    return f"{sorted(seconds)[int(0.99 * (len(seconds) - 1))] * 1000:.0f}"


def peak_mib(pid: int | None) -> str:
    if pid is None:
        return "-"
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return f"{int(peak.split()[1]) / 1024:.0f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--requests", type=int, default=5)
    args = parser.parse_args()
    limits = httpx.AsyncClient(base_url=args.url, timeout=300, trust_env=False)
    async with limits as client:
        stop = asyncio.Event()
        stop.set()
        print("| body | status | slowest answer, ms | neighbour's p99, ms | peak, MiB |")
        print("|---|---|---|---|---|")
        print(f"| none | | | {p99_ms(await neighbour(client, stop))} | {peak_mib(args.pid)} |")
        for name, path, body in bodies():
            stop = asyncio.Event()
            asking = asyncio.create_task(neighbour(client, stop))
            status, seconds = await attack(client, path, body, args.requests)
            stop.set()
            slowest, p99 = max(seconds) * 1000, p99_ms(await asking)
            print(
                f"| {name} | {status} | {slowest:.0f} | {p99} | {peak_mib(args.pid)} |", flush=True
            )


if __name__ == "__main__":
    asyncio.run(main())
