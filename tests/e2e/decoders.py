"""The decode workers of a deployment, and the counters of its gateway."""

import asyncio
import os
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from quire.async_client import AsyncClient
from quire.types import Worker

from .deployment import Deployment


async def busiest(client: AsyncClient) -> Worker:
    while True:
        workers = await decoders(client)
        worker = max(workers, key=lambda worker: worker.num_running, default=None)
        if worker is not None and worker.num_running > 0:
            return worker
        await asyncio.sleep(0.01)


async def decoders(client: AsyncClient) -> list[Worker]:
    """The decode workers that accept connections. For a moment the gateway also lists a worker that
    was just killed."""
    listed = [worker for worker in await client.workers() if worker.role == "decode"]
    return [worker for worker in listed if await accepts(worker)]


async def accepts(worker: Worker) -> bool:
    host, _, port = worker.address.rpartition(":")
    if not port:  # it starts
        return False
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def until_two_serve(client: AsyncClient, limit_s: float = 90.0) -> None:
    """Wait until two decode workers serve; asks for them, as tests before may have drained one."""
    async with asyncio.timeout(limit_s):
        while [worker.state for worker in await decoders(client)] != ["serving"] * 2:
            await client.scale(num_decode=2)
            await asyncio.sleep(0.05)


def pid_of(deployment: Deployment, worker: Worker) -> int:
    """The pid of the process that listens on the worker's port."""
    port = int(worker.address.rpartition(":")[2])
    for pid in deployment.running("services.decode"):
        if port in listening_ports(pid):
            return pid
    raise AssertionError(f"nobody listens on {worker.address}")


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on, from the kernel's list of sockets."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in sockets}


async def figures(deployment: Deployment, *names: str) -> list[float]:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{deployment.http}/metrics")).text
    found = {f.name: f.samples for f in text_string_to_metric_families(text)}
    return [sum(s.value for s in found[f"quire:{n}"] if s.name.endswith("_total")) for n in names]
