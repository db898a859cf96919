"""Rounds of the block manager while the server goes away, returns, or returns empty."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from blockstore.errors import StoreLost, StoreUnavailable, StoreUnsuitable, UnknownPool
from blockstore.memory_store import MemoryStore
from services.block_manager.rounds import Connection, RoundRunner
from services.runtime.grace_timer import GraceTimer
from tests.clock import Clock
from tests.memory_registry import MemoryRegistry

LIMIT_S = 10.0


def connection() -> Connection:
    return Connection(MemoryStore(), MemoryRegistry())


class Servers:
    """Connects to a new server each time, after some refusals."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.connected: list[Connection] = []

    async def connect(self) -> Connection:
        if self.refusals:
            raise self.refusals.pop(0)
        self.connected.append(connection())
        return self.connected[-1]


@pytest.fixture
async def limit() -> AsyncIterator[None]:
    async with asyncio.timeout(LIMIT_S):
        yield


@pytest.mark.usefixtures("limit")
async def test_a_round_is_done_again_until_the_server_answers() -> None:
    servers, first = Servers(), connection()
    runner = RoundRunner(first, servers.connect, 0.0)
    errors: list[Exception] = [StoreUnavailable("away"), UnknownPool("dropped")]
    rounds = []

    async def action(current: Connection) -> None:
        rounds.append(current)
        if errors:
            raise errors.pop()

    await runner.run_until_done(action)
    assert rounds == [first, first, first]
    assert servers.connected == []


@pytest.mark.usefixtures("limit")
async def test_a_lost_store_is_replaced_once_however_many_notice() -> None:
    servers = Servers(StoreUnavailable("starting"), StoreUnsuitable("evicts"))
    first = connection()
    runner = RoundRunner(first, servers.connect, 0.0)

    async def action(current: Connection) -> None:
        await asyncio.sleep(0)
        if current is first:
            raise StoreLost("empty")

    await asyncio.gather(*(runner.run_until_done(action) for _ in range(5)))
    assert len(servers.connected) == 1
    assert runner.connection is servers.connected[0]


@pytest.mark.usefixtures("limit")
async def test_every_round_uses_the_current_connection() -> None:
    """A closed registry answers only that it is closed: a manager that kept it would stay
    unknown."""
    servers, first = Servers(), connection()
    runner = RoundRunner(first, servers.connect, 0.0)
    announced = asyncio.Event()

    async def announce(current: Connection) -> None:
        if current is first:
            raise StoreUnavailable("closed")
        announced.set()

    async def notice(current: Connection) -> None:
        if current is first:
            raise StoreLost("empty")

    announcing = asyncio.create_task(runner.run_every(lambda: 0.0, announce))
    await runner.run_until_done(notice)
    await announced.wait()
    announcing.cancel()


async def test_unexpected_errors_end_the_loop() -> None:
    async def action(_: Connection) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await RoundRunner(connection(), Servers().connect, 0.0).run_every(lambda: 0.0, action)


def test_a_lasting_fault_is_overdue_at_the_limit() -> None:
    clock = Clock()
    overdue = GraceTimer[str](3.0, clock)
    assert overdue.check(["a"]) == set()
    clock.now_s += 2
    assert overdue.check(["a", "b"]) == set()
    clock.now_s += 1
    assert overdue.check(["a", "b"]) == {"a"}
    clock.now_s += 2
    assert overdue.check(["a", "b"]) == {"a", "b"}


def test_a_success_resets_the_time_of_a_fault() -> None:
    clock = Clock()
    overdue = GraceTimer[str](3.0, clock)
    overdue.check(["a"])
    clock.now_s += 2
    overdue.check([])
    clock.now_s += 2
    assert overdue.check(["a"]) == set()


def test_time_in_which_nobody_looked_does_not_count() -> None:
    clock = Clock()
    overdue = GraceTimer[str](3.0, clock)
    overdue.check(["a"])
    clock.now_s += 60
    assert overdue.check(["a"]) == set()
    clock.now_s += 3
    assert overdue.check(["a"]) == {"a"}
