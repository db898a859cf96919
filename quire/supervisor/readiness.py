"""Waits until a starting run serves, by asking its gateway what is still missing."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.async_client import AsyncClient
from quire.errors import QuireError, Unreachable
from quire.reports import Model, Pool, Worker
from quire.sockets import living_sockets
from quire.supervisor.models import ROLES, ModelOptions

_POLL_S = 0.05
_REMIND_S = 10.0


@dataclass(frozen=True, slots=True)
class Serving:
    """The models and pools of a run that is ready."""

    models: tuple[Model, ...]
    pools: tuple[Pool, ...]


async def wait_until_serving(
    run: Path,
    wanted: Sequence[ModelOptions],
    report: Callable[[str], None],
    *,
    has_others: bool = False,
) -> Serving:
    """Wait until all workers of the run serve, and the gateway serves all models. With
    `has_others`, other hosts may have workers, too.

    `run` is the directory with the gateways' sockets for operations, which need neither an API key
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
                missing = await _missing(client, wanted, run if has_others else None)
                if not missing:
                    return Serving(await client.models(), await client.pools())
        if missing != last_missing or loop.time() - reported_at > _REMIND_S:
            report(f"waiting for {missing}")
            last_missing, reported_at = missing, loop.time()
        await asyncio.sleep(_POLL_S)


async def _missing(client: AsyncClient, wanted: Sequence[ModelOptions], run: Path | None) -> str:
    """Describe what the run still waits for; empty if it is ready. `run` is None if all workers are
    its own."""
    try:
        workers = await client.workers()
        serving = [worker for worker in workers if worker.state == "serving"]
        own = [worker for worker in serving if run is None or _is_in(run, worker)]
        lacking = [text for model in wanted for text in _lacking(own, model)]
        lacking = lacking or [text for model in wanted for text in _elsewhere(serving, model)]
        if not lacking and not (await client.is_ready() and await _serves(client, wanted)):
            lacking = ["the gateway to connect to the workers"]
    except Unreachable:
        lacking = ["the gateway"]
    except QuireError as error:
        lacking = [f"the block manager ({error})"]
    return ", ".join(lacking)


async def _serves(client: AsyncClient, wanted: Sequence[ModelOptions]) -> bool:
    return {model.name for model in wanted} <= {model.id for model in await client.models()}


def _is_in(run: Path, worker: Worker) -> bool:
    """Whether a worker has its lock in a pool of this run."""
    return any((run / "pools").glob(f"*/workers/{worker.worker_id}.lock"))


def _lacking(own: Sequence[Worker], model: ModelOptions) -> Iterator[str]:
    for role in ROLES:
        number, num_serving = model.number(role), _count(own, model, role)
        if num_serving < number:
            yield f"{role} workers to load {model.name} ({num_serving} of {number} ready)"


def _elsewhere(serving: Sequence[Worker], model: ModelOptions) -> Iterator[str]:
    for role in model.roles_elsewhere:
        if not _count(serving, model, role):
            yield f"{role} workers of {model.name} on another host"


def _count(workers: Sequence[Worker], model: ModelOptions, role: str) -> int:
    return sum((worker.role, worker.model) == (role, model.name) for worker in workers)
