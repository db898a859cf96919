"""Workers take the other role in the same process while requests run. (`tests/chaos` disturbs such
changes.)"""

import asyncio
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Worker
from tests.waiting import until

from .deployment import Deployment
from .test_crashes import LIMIT_S, all_serve, streams

OTHER = {"prefill": "decode", "decode": "prefill"}


@pytest.fixture(scope="module")
def deployment(pairs: Deployment) -> Deployment:
    return pairs


async def change(client: AsyncClient, role: str) -> Worker:
    """Let a worker of this role take the other one. Returns the worker as it was."""

    async def told() -> Any:
        serving = [worker for worker in await client.workers() if worker.state == "serving"]
        of_role = [worker for worker in serving if worker.role == role]
        if len(of_role) < 2:
            return None
        try:
            await client.change_role(of_role[0].worker_id, OTHER[role])
        except QuireError:  # the last change is not over
            return None
        return of_role[0]

    found: Worker = await until(told, lambda worker: worker is not None, limit_s=LIMIT_S)
    return found


async def changed(client: AsyncClient, before: Worker) -> Worker:
    def serves(now: Worker | None) -> bool:
        return now is not None and (now.role, now.state) == (OTHER[before.role], "serving")

    async def listed() -> Any:
        return next((w for w in await client.workers() if w.worker_id == before.worker_id), None)

    found: Worker = await until(listed, serves, limit_s=LIMIT_S)
    return found


async def test_workers_change_their_roles_under_streams(
    deployment: Deployment, client: AsyncClient
) -> None:
    """Every token is the one of the undisturbed run, the process and its id stay, and the laws
    hold."""
    await all_serve(client)
    undisturbed = await asyncio.gather(*(stream.run(client) for stream in streams(7)))
    running = asyncio.gather(*(stream.run(client) for stream in streams(7)))
    for role in ("prefill", "decode", "decode", "prefill"):
        before = await change(client, role)
        now = await changed(client, before)
        assert (now.pid, now.name) == (before.pid, before.name)
    async with asyncio.timeout(LIMIT_S):
        assert await running == undisturbed
    await all_serve(client)
