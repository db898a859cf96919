"""The order in which workers read and take new weights."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from blockstore.registry import Member, Role
from quire.v1.worker_pb2 import Draining
from services.block_manager.operators.reload import Reloader
from services.runtime.errors import InvalidRequest, QuireError, Unavailable
from tests.memory_registry import MemoryRegistry

ROLES: tuple[Role, ...] = ("decode", "prefill")
OLD = [Member(f"{role}-1-00", role, f"{role}:1", "serving", 0, 1, model="m") for role in ROLES]


class Workers:
    """A worker of each role. They switch at once."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.told: list[tuple[str, ...]] = []
        self.refusals: dict[tuple[str, str], QuireError] = {}
        """The error with which a worker of this role answers this command."""
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.reloader = Reloader(self.tell, 1.0)

    async def announce(self, member: Member, **changes: Any) -> None:
        await self.registry.announce(replace(member, **changes), ttl_s=60)

    async def tell(self, worker: Member, **command: Any) -> Draining:
        said = worker.role, next(iter(command))
        self.told.append(said)
        if said in self.refusals:
            raise self.refusals[said]
        if "reload" in command:
            await self.may_read.wait()
            return Draining(has_new_weights=worker.member_id.endswith("0"))
        await self.registry.withdraw(worker.member_id)
        await self.announce(worker, member_id=f"{worker.role}-1-01")
        return Draining()

    async def reload(self) -> list[str]:
        async with asyncio.timeout(10):
            return list(await self.reloader.reload(self.registry, "m"))


@pytest.fixture
async def workers() -> Workers:
    found = Workers()
    for member in OLD:
        await found.announce(member)
    return found


async def test_all_workers_read_before_one_takes_the_weights(workers: Workers) -> None:
    """A worker that serves the weights already stays."""
    await workers.announce(OLD[0], member_id="decode-2-01")
    assert await workers.reload() == ["decode-1-01", "decode-2-01", "prefill-1-01"]
    assert [command for _, command in workers.told] == ["reload"] * 3 + ["drain"] * 2
    assert await workers.reload() == []


async def test_a_refusal_changes_no_worker_or_says_what_to_do(workers: Workers) -> None:
    workers.refusals["prefill", "reload"] = InvalidRequest("cut off")
    with pytest.raises(InvalidRequest, match="cut off"):
        await workers.reload()
    assert all(command == "reload" for _, command in workers.told)
    workers.refusals = {("prefill", "drain"): Unavailable("gone")}
    with pytest.raises(Unavailable, match=r"may serve the old weights \(gone\): reload again"):
        await workers.reload()


async def test_no_reload_begins_while_a_worker_starts_or_drains(workers: Workers) -> None:
    """It may have read the old weights, or serve in another role later."""
    await workers.announce(OLD[0], state="draining")
    with pytest.raises(Unavailable, match="decode-1-00 is draining"):
        await workers.reload()
    assert not workers.told


async def test_a_worker_that_comes_or_goes_ends_the_reload(workers: Workers) -> None:
    """As in a change of roles or an upgrade. A second reload waits for the end of the first."""
    workers.may_read.clear()
    first = asyncio.create_task(workers.reload())
    while len(workers.told) < len(OLD):
        await asyncio.sleep(0)
    second = asyncio.create_task(workers.reload())
    await asyncio.sleep(0)
    assert len(workers.told) == len(OLD)
    await workers.announce(OLD[0], member_id="decode-2-01", address="elsewhere:1")
    workers.may_read.set()
    with pytest.raises(Unavailable, match="nothing has changed"):
        await first
    assert await second == ["decode-1-01", "decode-2-01", "prefill-1-01"]
