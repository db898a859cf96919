"""Waits until a starting run serves, by asking its gateway what is still missing."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError, Unreachable
from quire.sockets import living_sockets
from quire.types import Model, Pool, Worker

_POLL_S = 0.05
_REMIND_S = 10.0


@dataclass(frozen=True, slots=True)
class Serving:
    """The models and pools of a run that is ready."""

    models: tuple[Model, ...]
    pools: tuple[Pool, ...]


async def wait_until_serving(
    run: Path, num_workers: Mapping[str, int], report: Callable[[str], None]
) -> Serving:
    """Wait until all workers serve and the gateway reports SERVING.

    `run`: the directory with the gateways' sockets for operations, which need neither an API key
    nor TLS. `num_workers`: the workers that the run starts, by role. `report` gets what is missing,
    whenever that changes and every ten seconds.
    """
    loop = asyncio.get_running_loop()
    last_missing, reported_at = "", loop.time()
    while True:
        # A new channel each time: an old one would back off before it connects again.
        sockets = living_sockets(run)
        missing = "the gateway"
        if sockets:
            async with AsyncClient(f"unix:{sockets[0]}") as client:
                missing = await _missing(client, num_workers)
                if not missing:
                    return Serving(await client.models(), await client.pools())
        if missing != last_missing or loop.time() - reported_at > _REMIND_S:
            report(f"waiting for {missing}")
            last_missing, reported_at = missing, loop.time()
        await asyncio.sleep(_POLL_S)


async def _missing(client: AsyncClient, num_workers: Mapping[str, int]) -> str:
    """Describes what the run still waits for; empty if the run is ready."""
    try:
        workers = await client.workers()
        lacking = _lacking(workers, num_workers)
        if not lacking and not await client.is_ready():
            lacking = ["the gateway to connect to the workers"]
    except Unreachable:
        lacking = ["the gateway"]
    except QuireError as error:
        lacking = [f"the block manager ({error})"]
    return ", ".join(lacking)


def _lacking(workers: tuple[Worker, ...], num_workers: Mapping[str, int]) -> list[str]:
    lacking = []
    for role, number in num_workers.items():
        serving = sum(worker.role == role and worker.state == "serving" for worker in workers)
        if serving < number:
            lacking.append(f"{role} workers to load the model ({serving} of {number} ready)")
    return lacking
