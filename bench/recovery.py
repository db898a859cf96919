"""How long a deployment of the demo model takes to serve again after a process is killed, and
until one more decode worker takes load.

    python -m bench.recovery [--repeats 3]

Starts `quire serve` by itself. Prints a markdown table: seconds from the kill to the end of the
first request that is answered.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.module_command import service_command
from quire.types import Sampling
from tests.e2e.deployment import Deployment, serving

_VICTIMS = (
    "--role=prefill",
    "--role=decode",
    "services.gateway",
    "services.block_manager",
    "valkey",
)
_PROMPT = list(range(300, 340))
_SAMPLING = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


async def until_answered(client: AsyncClient, began: float) -> float:
    while True:
        try:
            await client.complete(_PROMPT, _SAMPLING, timeout_s=5.0)
            await client.pools()
        except QuireError:
            await asyncio.sleep(0.02)
        else:
            return time.perf_counter() - began


async def after_kill(deployment: Deployment, client: AsyncClient, victim: str) -> float:
    await until_answered(client, time.perf_counter())
    await asyncio.sleep(2.0)
    for pid in deployment.children(victim):
        os.kill(pid, signal.SIGKILL)
    return await until_answered(client, time.perf_counter())


async def until_joined(deployment: Deployment, client: AsyncClient) -> float:
    """The time from the start of one more decode worker until it runs a request beside the
    other."""
    await until_answered(client, time.perf_counter())
    (pid,) = deployment.children("--role=decode")
    loads = [asyncio.create_task(_load(client)) for _ in range(2)]
    began = time.perf_counter()
    command, environment = service_command("decode"), _environment_of(pid)
    joining = await asyncio.create_subprocess_exec(
        *command, env=environment, stderr=subprocess.DEVNULL
    )
    while not await _both_run(client):
        await asyncio.sleep(0.02)
    took_s = time.perf_counter() - began
    for load in loads:
        load.cancel()
    joining.send_signal(signal.SIGTERM)
    await joining.wait()
    return took_s


def _environment_of(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environ = dict(os.fsdecode(entry).split("=", 1) for entry in raw if b"=" in entry)
    environ.pop("QUIRE_PARENT_FD", None)
    return environ


async def _load(client: AsyncClient) -> None:
    while True:
        await client.complete(_PROMPT, Sampling(temperature=0.0, max_tokens=40, ignore_eos=True))


async def _both_run(client: AsyncClient) -> bool:
    decoders = [worker for worker in await client.workers() if worker.role == "decode"]
    return len(decoders) == 2 and all(worker.num_running for worker in decoders)


async def measure(deployment: Deployment, repeats: int) -> None:
    client = AsyncClient(deployment.address, operations=deployment.operations)
    print("| what | median, s | worst, s |\n|---|---:|---:|")
    for victim in _VICTIMS:
        times = [await after_kill(deployment, client, victim) for _ in range(repeats)]
        print(f"| {victim} killed | {statistics.median(times):.1f} | {max(times):.1f} |")
    times = [await until_joined(deployment, client) for _ in range(repeats)]
    print(f"| one more decode worker | {statistics.median(times):.1f} | {max(times):.1f} |")
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder, serving("demo", Path(folder)) as deployment:
        asyncio.run(measure(deployment, repeats))


if __name__ == "__main__":
    main()
