"""The decode workers of a deployment, and the counters of its gateway."""

import asyncio
import os
from collections import Counter
from pathlib import Path

from blockstore.redis_store import RedisStore
from quire.async_client import AsyncClient
from quire.reports import Worker
from tests.waiting import until

from .deployment import Deployment


async def busy(deployment: Deployment, client: AsyncClient) -> list[Worker]:
    """The decode workers that have requests, the busiest one first, once one has any. The ledger
    lists requests at once; a worker reports its load to the registry once a second, and a request
    may end before that."""
    (socket,) = deployment.run_root.glob("*/redis.sock")
    store = await RedisStore.connect(f"unix://{socket}")
    pools = [pool.pool_id for pool in await client.pools()]

    async def found() -> list[Worker]:
        held = Counter([h.worker_id for pool in pools for h in await store.holders(pool)])
        workers = [worker for worker in await decoders(client) if held[worker.worker_id]]
        return sorted(workers, key=lambda worker: -held[worker.worker_id])

    try:
        return await until(found)
    finally:
        await store.close()


async def busiest(deployment: Deployment, client: AsyncClient) -> Worker:
    return (await busy(deployment, client))[0]


async def decoders(client: AsyncClient) -> list[Worker]:
    return [worker for worker in await living(client) if worker.role == "decode"]


async def living(client: AsyncClient) -> list[Worker]:
    """The workers that accept connections. The registry keeps the entry of a worker that was killed
    for some seconds, with the state that it had."""
    return [worker for worker in await client.workers() if await accepts(worker)]


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


async def until_two_serve(client: AsyncClient) -> None:
    """Wait until two decode workers serve; asks for them, as tests before may have drained one."""

    async def states() -> list[str]:
        await client.scale(num_decode=2)
        return await decoder_states(client)

    await until(states, lambda now: now == ["serving"] * 2, limit_s=90)


async def decoder_states(client: AsyncClient) -> list[str]:
    return [worker.state for worker in await decoders(client)]


def pid_of(deployment: Deployment, worker: Worker) -> int:
    """The pid of the process that listens on the worker's port."""
    port = int(worker.address.rpartition(":")[2])
    for pid in deployment.running("--role=decode"):
        if port in listening_ports(pid):
            return pid
    raise AssertionError(f"nobody listens on {worker.address}")


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on, from the kernel's list of sockets."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in sockets}
