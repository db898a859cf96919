"""Workers take the other role while requests run: clients see only a pause."""

import asyncio
import os
import signal
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.reports import Worker
from tests.waiting import until

from .deployment import Deployment
from .test_crashes import LIMIT_S, all_serve, is_whole, streams

OTHER = {"prefill": "decode", "decode": "prefill"}


@pytest.fixture(scope="module")
def deployment(pairs: Deployment) -> Deployment:
    return pairs


async def until_four_serve(client: AsyncClient) -> None:
    """Wait until two workers of each role serve again; a worker that was killed has the role with
    which it was started."""

    async def is_restored() -> bool:
        try:
            await client.scale(num_prefill=2, num_decode=2)
        except QuireError:
            return False
        return await is_whole(client, prefill=2, decode=2)

    await until(is_restored, limit_s=LIMIT_S)


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


@pytest.mark.parametrize("victim", ["worker", "gateway"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_process_that_is_killed_in_a_change_only_delays_streams(
    deployment: Deployment, client: AsyncClient, role: str, victim: str
) -> None:
    await until_four_serve(client)
    undisturbed = await asyncio.gather(*(stream.run(client) for stream in streams(8)))
    disturbed = streams(8)
    running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await disturbed[0].reaches(40)
    worker = await change(client, role)
    its_gateway = deployment.gateway(client.address)
    os.kill(worker.pid if victim == "worker" else its_gateway, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*running) == undisturbed
    await until_four_serve(client)


async def test_the_last_worker_of_a_role_keeps_it(client: AsyncClient) -> None:
    await until_four_serve(client)
    await changed(client, await change(client, "prefill"))
    workers = {worker.role: worker for worker in await client.workers()}
    with pytest.raises(QuireError, match="is the last prefill worker that serves"):
        await client.change_role(workers["prefill"].worker_id, "decode")
    with pytest.raises(QuireError, match="is a decode worker already"):
        await client.change_role(workers["decode"].worker_id, "decode")
    scaled = await client.scale(num_prefill=2, num_decode=2)
    assert list(scaled.changing.values()) == ["prefill"]
    await until_four_serve(client)
