"""The decode workers of a deployment."""

import asyncio

from quire.async_client import AsyncClient
from quire.reports import Worker
from tests.waiting import until


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
