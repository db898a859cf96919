"""The workers as the registry lists them: joining, leaving, and unusable ones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from blockstore.errors import StoreLost, StoreUnavailable
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.registry import Member, Role
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.models.catalog import Model
from services.gateway.workers.worker import Worker
from services.runtime.errors import StartupError
from tests.memory_registry import MemoryRegistry
from tests.waiting import until

TTL_S = 1e6


class FakeConnection:
    """A connection that is open from the start."""

    def __init__(self, member: Member) -> None:
        self.worker = Worker(member, lambda command: None)
        self.worker.connected = True
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class WatchedRegistry(MemoryRegistry):
    """Calls `before_read` before its members are read."""

    before_read: Callable[[], None] = staticmethod(lambda: None)

    async def members(self) -> tuple[Member, ...]:
        self.before_read()
        return await super().members()


class DirectorySetup:
    """A directory on a store with two pools, `a` and `b`; the model directory `bad` is broken."""

    def __init__(self) -> None:
        self.store, self.registry, self.changes = MemoryStore(), WatchedRegistry(), ChangeNotifier()
        self.connections: dict[str, FakeConnection] = {}
        """By worker id; those of a worker that mixes by its id and the role, too."""
        self.num_loads = 0
        self.now_s = 0.0
        self.directory = WorkerDirectory(
            self.registry,
            self.store,
            self._connect,
            self._load,
            self.changes.notify,
            poll_s=0.001,
            clock=lambda: self.now_s,
        )

    def _connect(self, member: Member) -> FakeConnection:
        name = f"{member.member_id} {member.role}" if member.mix else member.member_id
        return self.connections.setdefault(name, FakeConnection(member))

    def _load(self, directory: str) -> Model:
        self.num_loads += 1
        if directory == "bad":
            raise StartupError("bad/tokenizer.json does not exist")
        return object.__new__(Model)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[WorkerDirectory]:
        """Another directory, which looks an hour later unless it has a reason to look earlier."""
        directory = WorkerDirectory(
            self.registry,
            self.store,
            self._connect,
            self._load,
            self.changes.notify,
            poll_s=3600,
        )
        watching = asyncio.create_task(directory.watch())
        yield directory
        watching.cancel()
        await asyncio.wait([watching])

    async def announce(self, *members: Member) -> None:
        for member in members:
            await self.registry.announce(member, TTL_S)
        await self.directory.refresh()


@pytest.fixture
async def setup() -> DirectorySetup:
    setup = DirectorySetup()
    for pool_id, model in (("a", "one"), ("b", "two")):
        await setup.store.register_pool(PoolSpec(pool_id, model, "f", 64, 16, 1))
    return setup


def member(worker_id: str, role: Role, pool_id: str = "a", model: str = "one") -> Member:
    return Member(
        worker_id,
        role,
        "host:1",
        "serving",
        1,
        1,
        pool_id,
        model,
        model,
        max_model_len=4096,
        max_num_seqs=16,
    )


async def test_a_model_is_served_by_pools_with_workers_of_each_kind(setup: DirectorySetup) -> None:
    await setup.announce(member("p1", "prefill"), member("d2", "decode", "b", "two"))
    assert setup.directory.model_names() == ("one", "two")
    assert not setup.directory.ready()
    assert setup.directory.complete_pools("one") == ()
    await setup.announce(replace(member("d1", "decode"), max_model_len=2048))
    assert setup.directory.ready()
    (pool,) = setup.directory.complete_pools("one")
    assert (pool.spec.pool_id, [w.id for w in pool.prefill]) == ("a", ["p1"])
    served = setup.directory.served("one")
    assert served is not None
    assert served.max_model_len == 2048
    assert served.max_slots == 16
    assert setup.directory.served("three") is None


async def test_a_worker_that_leaves_the_registry_is_disconnected(setup: DirectorySetup) -> None:
    await setup.announce(member("p1", "prefill"), member("d1", "decode"))
    num_changes = setup.changes.num_changes
    setup.connections["d1"].worker.connected = False
    await setup.registry.withdraw("d1")
    await setup.directory.refresh()
    assert setup.connections["d1"].closed
    assert not setup.directory.ready()
    assert setup.changes.num_changes > num_changes


async def test_a_registry_that_was_lost_costs_nobody_its_connection(setup: DirectorySetup) -> None:
    """Workers enter themselves again; one that does not within 5 s has left."""
    await setup.announce(member("p1", "prefill"), member("d1", "decode"))
    for worker_id in ("p1", "d1"):
        await setup.registry.withdraw(worker_id)
    await setup.directory.refresh()
    assert setup.directory.ready()
    setup.now_s += 3.0
    await setup.announce(member("p1", "prefill"))
    setup.now_s += 3.0
    await setup.directory.refresh()
    assert setup.connections["d1"].closed
    assert not setup.connections["p1"].closed


async def test_a_starting_worker_is_left_alone_and_a_draining_one_gets_nothing(
    setup: DirectorySetup,
) -> None:
    await setup.announce(replace(member("p1", "prefill"), state="starting"))
    assert not setup.connections
    await setup.announce(member("p1", "prefill"), member("d1", "decode"))
    assert setup.directory.ready()
    await setup.announce(replace(member("d1", "decode"), state="draining"))
    assert not setup.directory.ready()
    assert not setup.connections["d1"].closed


async def test_a_worker_that_mixes_is_one_of_each_role(setup: DirectorySetup) -> None:
    """The gateway has a connection for each, and drops both with the worker."""
    mixed = replace(member("d1", "decode"), mix=True)
    await setup.announce(replace(mixed, state="starting"))
    assert setup.directory.is_starting("one")
    await setup.announce(mixed)
    await setup.directory.refresh()
    assert setup.directory.ready()
    (pool,) = setup.directory.complete_pools("one")
    workers = *pool.prefill, *pool.decode
    roles = [(worker.id, worker.member.role) for worker in workers]
    assert roles == [("d1", "prefill"), ("d1", "decode")]
    assert len(setup.connections) == len(setup.directory.workers) == 2
    for worker in workers:
        worker.connected = False
    await setup.registry.withdraw("d1")
    await setup.directory.refresh()
    assert all(connection.closed for connection in setup.connections.values())
    assert not setup.directory.workers


async def test_a_worker_that_has_taken_another_role_gets_a_new_connection(
    setup: DirectorySetup,
) -> None:
    """Also if the directory has not seen it drain: the registry is read only once in a while."""
    await setup.announce(member("p1", "prefill"), member("w2", "prefill"), member("d1", "decode"))
    before = setup.connections.pop("w2")
    await setup.announce(replace(member("w2", "decode"), address="host:2"))
    assert before.closed
    (pool,) = setup.directory.complete_pools("one")
    assert [worker.id for worker in pool.prefill] == ["p1"]
    assert sorted(worker.id for worker in pool.decode) == ["d1", "w2"]
    assert setup.connections["w2"].worker.member.address == "host:2"


async def test_a_model_is_read_while_its_workers_start(setup: DirectorySetup) -> None:
    starting = replace(member("p1", "prefill"), state="starting", pool_id="")
    broken = replace(member("p2", "prefill"), state="starting", model_dir="bad")
    await setup.announce(starting)
    assert setup.num_loads == 1
    await setup.announce(member("p1", "prefill"), member("d1", "decode"), broken)
    assert setup.num_loads == 2
    assert set(setup.connections) == {"p1", "d1"}
    assert setup.directory.ready()


async def test_starting_workers_are_looked_for_more_often(setup: DirectorySetup) -> None:
    for each in (replace(member("p1", "prefill"), state="starting"), member("d1", "decode")):
        await setup.registry.announce(each, TTL_S)
    async with setup.watching() as directory:
        await until(lambda: setup.num_loads > 0)
        await setup.registry.announce(member("p1", "prefill"), TTL_S)
        await until(directory.ready)


async def test_the_registry_is_read_again_at_once_when_a_worker_has_changed(
    setup: DirectorySetup,
) -> None:
    """A worker that has taken another role closes its streams, and serves a moment later."""
    await setup.announce(member("p1", "prefill"), member("w2", "prefill"), member("d1", "decode"))
    async with setup.watching() as directory:
        await until(directory.ready)
        changing = setup.connections.pop("w2").worker
        changing.draining, changing.connected = True, False
        directory.look_again()
        await setup.registry.announce(member("w2", "decode"), TTL_S)
        await until(lambda: len(directory.decode_workers()["a"]) == 2)


async def test_a_broken_model_directory_makes_only_its_workers_unusable(
    setup: DirectorySetup,
) -> None:
    broken = replace(member("p2", "prefill", "b"), model_dir="bad")
    await setup.announce(member("p1", "prefill"), broken, member("d1", "decode"))
    assert set(setup.connections) == {"p1", "d1"}
    assert setup.directory.unusable.keys() == {"p2"}
    assert setup.directory.ready()


async def test_a_pool_that_the_store_does_not_know_yet_is_tried_again(
    setup: DirectorySetup,
) -> None:
    await setup.announce(member("p1", "prefill", "c"))
    assert not setup.connections
    await setup.store.register_pool(PoolSpec("c", "one", "f", 64, 16, 1))
    await setup.directory.refresh()
    assert set(setup.connections) == {"p1"}


async def test_the_block_manager_is_known_while_it_is_there(setup: DirectorySetup) -> None:
    await setup.announce(member("bm", "block_manager"), member("g", "gateway"))
    assert [each.member_id for each in setup.directory.block_managers] == ["bm"]
    assert not setup.connections
    await setup.registry.withdraw("bm")
    await setup.directory.refresh()
    assert not setup.directory.block_managers


async def test_a_silent_registry_changes_nothing_and_a_lost_one_ends_the_watch(
    setup: DirectorySetup,
) -> None:
    await setup.announce(member("p1", "prefill"), member("d1", "decode"))
    num_asked = 0

    def fail() -> None:
        nonlocal num_asked
        num_asked += 1
        assert setup.directory.ready()
        raise StoreUnavailable("no answer") if num_asked < 3 else StoreLost("another one")

    setup.registry.before_read = fail
    with pytest.raises(StoreLost):
        await setup.directory.watch()
    assert num_asked == 3
    assert all(connection.closed for connection in setup.connections.values())


async def test_a_change_after_the_last_look_is_not_waited_for() -> None:
    changes = ChangeNotifier()
    num_changes = changes.num_changes
    changes.notify()
    assert await changes.wait(num_changes, timeout_s=0)
    assert not await changes.wait(changes.num_changes, timeout_s=0)


async def test_a_change_ends_every_wait() -> None:
    changes = ChangeNotifier()
    waiting = [asyncio.create_task(changes.wait(changes.num_changes)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waiting) == [True] * 3
