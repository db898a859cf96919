"""What the walk of a request costs on a running deployment: first token, the next ones, hand-off to
free blocks after a cancellation.

    quire serve --decode 2 &
    python -m bench.walk

Prints a markdown table; medians, with the 99th percentile where there are enough samples.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise

from quire.async_client import AsyncClient
from quire.calls import DEFAULT_ADDRESS
from quire.cli.runs import run_address
from quire.supervisor import RUNS
from quire.types import Sampling

_PROMPT = list(range(300, 364))


async def stream_times(client: AsyncClient, num_tokens: int) -> list[float]:
    """Seconds from the request to each delta."""
    began = time.perf_counter()
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [time.perf_counter() - began async for _ in client.generate(_PROMPT, sampling)]


async def one_after_another(client: AsyncClient, repeats: int) -> tuple[list[float], list[float]]:
    """First-token times and gaps of single streams."""
    first: list[float] = []
    gaps: list[float] = []
    for _ in range(repeats):
        times = await stream_times(client, 64)
        first.append(times[0])
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return first, gaps


async def throughput(client: AsyncClient, num_streams: int, num_tokens: int) -> float:
    """Tokens a second of streams that start together."""
    began = time.perf_counter()
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    await asyncio.gather(*(client.complete(_PROMPT, sampling) for _ in range(num_streams)))
    return num_streams * num_tokens / (time.perf_counter() - began)


async def cancelled_to_free(client: AsyncClient, num_streams: int) -> float:
    """Seconds from dropping all streams until nothing is held on any pool."""
    started = asyncio.Semaphore(0)
    dropped = asyncio.Event()

    async def run() -> None:
        sampling = Sampling(temperature=0.0, max_tokens=1000, ignore_eos=True)
        async with aclosing(client.generate(_PROMPT, sampling)) as stream:
            await anext(stream)
            started.release()
            await dropped.wait()

    tasks = [asyncio.create_task(run()) for _ in range(num_streams)]
    for _ in tasks:
        await started.acquire()
    began = time.perf_counter()
    dropped.set()
    await asyncio.gather(*tasks)
    while any(pool.num_held for pool in await client.pools()):
        pass
    return time.perf_counter() - began


def shown(seconds: Sequence[float]) -> str:
    median = f"{1000 * statistics.median(seconds):.1f}"
    if len(seconds) < 100:
        return f"{median} ms"
    return f"{median} ms (p99 {1000 * statistics.quantiles(seconds, n=100)[98]:.1f})"


async def measure(address: str, operations: str) -> None:
    client = AsyncClient(address, operations=operations)
    await throughput(client, 4, 16)  # connections and caches are warm from here on
    first, gaps = await one_after_another(client, 20)
    rows = [("first token, one stream", shown(first)), ("between tokens, one stream", shown(gaps))]
    for num_streams in (1, 8, 32):
        rates = [await throughput(client, num_streams, 64) for _ in range(3)]
        rows.append(
            (f"{num_streams} streams of 64 tokens", f"{statistics.median(rates):,.0f} tok/s")
        )
    free = [await cancelled_to_free(client, 16) for _ in range(10)]
    rows.append(("16 streams cancelled until nothing is held", shown(free)))
    await client.close()
    print("| what | median |\n|---|---:|")
    for name, figure in rows:
        print(f"| {name} | {figure} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--address", default=DEFAULT_ADDRESS)
    parser.add_argument("--run", help="its gRPC port, or its directory; default: the only run")
    args = parser.parse_args()
    asyncio.run(measure(args.address, run_address(args.run, RUNS)))


if __name__ == "__main__":
    main()
