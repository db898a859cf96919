"""The workers as the registry lists them: joining, leaving, and unusable ones."""

import asyncio
from dataclasses import replace

import pytest

from blockstore.errors import StoreLost, StoreUnavailable
from blockstore.memory_registry import MemoryRegistry
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Member, Role
from services.common.errors import StartupError
from services.gateway.change_notifier import ChangeNotifier
from services.gateway.intake.catalog import Model
from services.gateway.workers import directory as fleets
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.worker import Worker

TTL_S = 1e6


class FakeConnection:
    """A connection that is open from the start."""

    def __init__(self, member: Member) -> None:
        self.worker = Worker(member, lambda command: None)
        self.worker.connected = True
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Harbour:
    """A directory on a store with two pools, `a` and `b`; the model directory `bad` is broken."""

    def __init__(self) -> None:
        self.store, self.registry, self.changes = MemoryStore(), MemoryRegistry(), ChangeNotifier()
        self.connections: dict[str, FakeConnection] = {}
        self.num_loads = 0
        self.now_s = 0.0
        self.directory = WorkerDirectory(
            *(self.registry, self.store, self._connect, self._load, self.changes.notify),
            poll_s=0.001,
            clock=lambda: self.now_s,
        )

    def _connect(self, member: Member) -> FakeConnection:
        return self.connections.setdefault(member.member_id, FakeConnection(member))

    def _load(self, directory: str) -> Model:
        self.num_loads += 1
        if directory == "bad":
            raise StartupError("bad/tokenizer.json does not exist")
        return object.__new__(Model)

    async def announce(self, *members: Member) -> None:
        for member in members:
            await self.registry.announce(member, TTL_S)
        await self.directory.refresh()


@pytest.fixture
async def harbour() -> Harbour:
    harbour = Harbour()
    for pool_id, model in (("a", "one"), ("b", "two")):
        await harbour.store.register_pool(PoolSpec(pool_id, model, "f", 64, 16, 1))
    return harbour


def member(worker_id: str, role: Role, pool_id: str = "a", model: str = "one") -> Member:
    return Member(
        *(worker_id, role, "host:1", "serving", 1, 1, pool_id, model, model),
        max_model_len=4096,
        max_num_seqs=16,
    )


async def test_a_model_is_served_by_pools_with_workers_of_each_kind(harbour: Harbour) -> None:
    await harbour.announce(member("p1", "prefill"), member("d2", "decode", "b", "two"))
    assert harbour.directory.model_names() == ("one", "two")
    assert not harbour.directory.ready()
    assert harbour.directory.complete_pools("one") == ()
    await harbour.announce(replace(member("d1", "decode"), max_model_len=2048))
    assert harbour.directory.ready()
    (pool,) = harbour.directory.complete_pools("one")
    assert (pool.spec.pool_id, [w.id for w in pool.prefill]) == ("a", ["p1"])
    served = harbour.directory.served("one")
    assert served is not None
    assert served.max_model_len == 2048
    assert served.max_slots == 16
    assert harbour.directory.served("three") is None


async def test_a_model_is_read_once_for_all_its_workers(harbour: Harbour) -> None:
    await harbour.announce(member("p1", "prefill"), member("d1", "decode"))
    await harbour.directory.refresh()
    assert harbour.num_loads == 1


async def test_a_worker_that_leaves_the_registry_is_disconnected_and_announced(
    harbour: Harbour,
) -> None:
    await harbour.announce(member("p1", "prefill"), member("d1", "decode"))
    heard = harbour.changes.num_changes
    harbour.connections["d1"].worker.connected = False
    await harbour.registry.withdraw("d1")
    await harbour.directory.refresh()
    assert harbour.connections["d1"].closed
    assert not harbour.directory.ready()
    assert harbour.changes.num_changes > heard


async def test_a_registry_that_was_lost_costs_nobody_its_connection(harbour: Harbour) -> None:
    """Workers enter themselves again; one that does not within 5 s has left."""
    await harbour.announce(member("p1", "prefill"), member("d1", "decode"))
    for worker_id in ("p1", "d1"):
        await harbour.registry.withdraw(worker_id)
    await harbour.directory.refresh()
    assert harbour.directory.ready()
    harbour.now_s += 3.0
    await harbour.announce(member("p1", "prefill"))
    harbour.now_s += 3.0
    await harbour.directory.refresh()
    assert harbour.connections["d1"].closed
    assert not harbour.connections["p1"].closed


async def test_a_starting_worker_is_left_alone_and_a_draining_one_gets_nothing(
    harbour: Harbour,
) -> None:
    await harbour.announce(replace(member("p1", "prefill"), state="starting"))
    assert not harbour.connections
    await harbour.announce(member("p1", "prefill"), member("d1", "decode"))
    assert harbour.directory.ready()
    await harbour.announce(replace(member("d1", "decode"), state="draining"))
    assert not harbour.directory.ready()
    assert not harbour.connections["d1"].closed


async def test_a_model_is_read_while_its_workers_start(harbour: Harbour) -> None:
    starting = replace(member("p1", "prefill"), state="starting", pool_id="")
    broken = replace(member("p2", "prefill"), state="starting", model_dir="bad")
    await harbour.announce(starting)
    assert harbour.num_loads == 1
    await harbour.announce(member("p1", "prefill"), member("d1", "decode"), broken)
    assert harbour.num_loads == 2
    assert set(harbour.connections) == {"p1", "d1"}
    assert harbour.directory.ready()


async def test_starting_workers_are_looked_for_more_often(
    harbour: Harbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 3:
            raise asyncio.CancelledError
        await harbour.registry.withdraw("p1")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(fleets, "until_tick", lambda pause_s: pause_s)
    await harbour.registry.announce(replace(member("p1", "prefill"), state="starting"), TTL_S)
    directory = WorkerDirectory(
        harbour.registry, harbour.store, harbour._connect, harbour._load, harbour.changes.notify
    )
    with pytest.raises(asyncio.CancelledError):
        await directory.watch()
    assert pauses == [0.05, 0.5, 0.5]


async def test_a_broken_model_directory_makes_only_its_workers_unusable(harbour: Harbour) -> None:
    broken = replace(member("p2", "prefill", "b"), model_dir="bad")
    await harbour.announce(member("p1", "prefill"), broken, member("d1", "decode"))
    assert set(harbour.connections) == {"p1", "d1"}
    assert harbour.directory.ready()


async def test_a_pool_that_the_store_does_not_know_yet_is_tried_again(harbour: Harbour) -> None:
    await harbour.announce(member("p1", "prefill", "c"))
    assert not harbour.connections
    await harbour.store.register_pool(PoolSpec("c", "one", "f", 64, 16, 1))
    await harbour.directory.refresh()
    assert set(harbour.connections) == {"p1"}


async def test_the_block_manager_is_known_while_it_is_there(harbour: Harbour) -> None:
    await harbour.announce(member("bm", "block_manager"), member("g", "gateway"))
    assert [each.member_id for each in harbour.directory.block_managers] == ["bm"]
    assert not harbour.connections
    await harbour.registry.withdraw("bm")
    await harbour.directory.refresh()
    assert not harbour.directory.block_managers


async def test_a_silent_registry_changes_nothing_and_a_lost_one_ends_the_watch(
    harbour: Harbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harbour.announce(member("p1", "prefill"), member("d1", "decode"))
    num_asked = 0

    async def members() -> tuple[Member, ...]:
        nonlocal num_asked
        num_asked += 1
        assert harbour.directory.ready()
        if num_asked < 3:
            raise StoreUnavailable("no answer")
        raise StoreLost("another one")

    monkeypatch.setattr(harbour.registry, "members", members)
    with pytest.raises(StoreLost):
        await harbour.directory.watch()
    assert num_asked == 3
    assert all(connection.closed for connection in harbour.connections.values())


async def test_a_bell_that_rang_after_the_look_is_not_waited_for() -> None:
    changes = ChangeNotifier()
    heard = changes.num_changes
    changes.notify()
    assert await changes.wait(heard, timeout_s=0)
    assert not await changes.wait(changes.num_changes, timeout_s=0)


async def test_a_bell_wakes_everybody() -> None:
    changes = ChangeNotifier()
    waiting = [asyncio.create_task(changes.wait(changes.num_changes)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waiting) == [True] * 3
