"""Waits until a starting run serves, by asking its gateway what is still missing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError, Unreachable
from quire.sockets import living_sockets
from quire.supervisor.models import ModelOptions
from quire.types import Model, Pool, Worker

_POLL_S = 0.05
_REMIND_S = 10.0


@dataclass(frozen=True, slots=True)
class Serving:
    """The models and pools of a run that is ready."""

    models: tuple[Model, ...]
    pools: tuple[Pool, ...]


async def wait_until_serving(
    run: Path, wanted: Sequence[ModelOptions], report: Callable[[str], None]
) -> Serving:
    """Wait until all workers serve, and the gateway serves all models.

    `run`: the directory with the gateways' sockets for operations, which need neither an API key
    nor TLS. `report` gets what is missing, whenever that changes and every ten seconds.
    """
    loop = asyncio.get_running_loop()
    last_missing, reported_at = "", loop.time()
    while True:
        # A new channel each time: an old one would back off before it connects again.
        sockets = living_sockets(run)
        missing = "the gateway"
        if sockets:
            async with AsyncClient(f"unix:{sockets[0]}") as client:
                missing = await _missing(client, wanted)
                if not missing:
                    return Serving(await client.models(), await client.pools())
        if missing != last_missing or loop.time() - reported_at > _REMIND_S:
            report(f"waiting for {missing}")
            last_missing, reported_at = missing, loop.time()
        await asyncio.sleep(_POLL_S)


async def _missing(client: AsyncClient, wanted: Sequence[ModelOptions]) -> str:
    """Describes what the run still waits for; empty if the run is ready."""
    try:
        workers = await client.workers()
        lacking = [text for model in wanted for text in _lacking(workers, model)]
        if not lacking and not (await client.is_ready() and await _serves(client, wanted)):
            lacking = ["the gateway to connect to the workers"]
    except Unreachable:
        lacking = ["the gateway"]
    except QuireError as error:
        lacking = [f"the block manager ({error})"]
    return ", ".join(lacking)


async def _serves(client: AsyncClient, wanted: Sequence[ModelOptions]) -> bool:
    return {model.name for model in wanted} <= {model.id for model in await client.models()}


def _lacking(workers: tuple[Worker, ...], model: ModelOptions) -> list[str]:
    lacking = []
    for role in ("prefill", "decode"):
        ready, number = (role, model.name, "serving"), model.number(role)
        serving = sum((w.role, w.model, w.state) == ready for w in workers)
        if serving < number:
            text = f"{role} workers to load {model.name} ({serving} of {number} ready)"
            lacking.append(text)
    return lacking
