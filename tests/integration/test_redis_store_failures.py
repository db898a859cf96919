"""Broken connections, lost answers, and servers that vanish, freeze or are full.

A proxy between the store and the server loses the bytes that a test tells it to lose.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from blockstore.errors import OutOfBlocks, StoreUnavailable
from blockstore.records import Allocation, Claim, Extension, Grown, Growth, PoolSpec
from blockstore.redis_store import RedisStore
from tests.conftest import Valkey

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
HASH = b"0123456789abcdef"


@dataclass
class Budget:
    """After so many bytes in one direction the connection breaks, once. None: it does not break."""

    left: int | None = None

    def spend(self, data: bytes) -> tuple[bytes, bool]:
        """The part of `data` that passes, and whether the connection breaks after it."""
        if self.left is None or self.left > len(data):
            self.left = None if self.left is None else self.left - len(data)
            return data, False
        passing, self.left = data[: self.left], None
        return passing, True


@dataclass
class Proxy:
    """Passes bytes between stores and the server, and loses some of them on demand."""

    socket: str
    url: str = ""
    num_links: int = 0
    requests: Budget = field(default_factory=Budget)
    answers: Budget = field(default_factory=Budget)
    _open: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = field(default_factory=dict)
    _held: list[tuple[asyncio.Task[None], asyncio.Event]] = field(default_factory=list)
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    async def link(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection, until both sides have ended or it breaks."""
        self.num_links += 1
        server, to_server = await asyncio.open_unix_connection(self.socket)
        task, writers = asyncio.current_task(), [to_client, to_server]
        assert task is not None
        self._open[task] = writers
        flowing = self.flowing
        try:
            await asyncio.gather(
                self._pass(client, to_server, self.requests, flowing),
                self._pass(server, to_client, self.answers, None),
            )
        except ConnectionError:
            pass
        finally:
            del self._open[task]
            for writer in writers:
                writer.transport.abort()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        budget: Budget,
        flowing: asyncio.Event | None,
    ) -> None:
        """ConnectionError: the link breaks here."""
        while data := await reader.read(65536):
            if flowing is not None:
                await flowing.wait()
            passing, is_broken = budget.spend(data)
            writer.write(passing)
            await writer.drain()
            if is_broken:
                raise ConnectionResetError
        writer.write_eof()

    def cut(self) -> None:
        """Break all links."""
        for writers in self._open.values():
            for writer in writers:
                writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        while self._open:
            await asyncio.wait(self._open)

    def hold(self) -> None:
        """Hold back requests on the present links; those of later links pass."""
        self.flowing.clear()
        self._held = [(task, self.flowing) for task in self._open]
        self.flowing = asyncio.Event()
        self.flowing.set()

    async def let_go(self) -> None:
        """Deliver the held requests, and wait until the server has read those of the link that its
        client has left. Idle links stay open."""
        for _, flowing in self._held:
            flowing.set()
        links = [task for task, _ in self._held]
        await asyncio.wait(links, return_when=asyncio.FIRST_COMPLETED)


@pytest.fixture
async def proxy(valkey: Valkey) -> AsyncIterator[Proxy]:
    proxy = Proxy(str(valkey.socket))
    proxy.flowing.set()
    listener = await asyncio.start_server(proxy.link, "127.0.0.1", 0)
    proxy.url = "redis://{}:{}".format(*listener.sockets[0].getsockname())
    yield proxy
    listener.close()
    await proxy.close()
    await listener.wait_closed()


@pytest.fixture
async def store(proxy: Proxy) -> AsyncIterator[RedisStore]:
    """A store behind the proxy; a connection without an answer counts as broken after 1 s."""
    store = await RedisStore.connect(proxy.url, retry_for_s=2)
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    yield store
    await store.close()


async def walk(store: RedisStore) -> list[object]:
    """Calls of every kind that changes something, submitted at once."""
    return await asyncio.gather(
        store.allocate("pool", "a", "w", 1, [], 3),
        store.commit("pool", "a", 1, [(0, HASH)]),
        store.allocate("pool", "b", "w", 2, [HASH], 2),
        store.extend("pool", "w", [Growth("b", 1, 2, 4)]),
        store.allocate("pool", "c", "w", 3, [], 12),
        store.withdraw("pool", "c"),
        store.detach("pool", "b", 1),
        store.claim("pool", "b", 2, "w"),
        store.give_back("pool", "b", 3, [4]),
        store.release("pool", "a", 1),
        store.allocate("pool", "d", "w", 4, [], 3),
        store.release("pool", "b", 3),
        return_exceptions=True,
    )


async def check_walk(store: RedisStore) -> None:
    """The answers of `walk` and its final state, however often parts of it were sent."""
    a, committed, b, extension, short, _, detached, claimed, _, _, d, _ = await walk(store)
    assert a == Allocation("a", 1, (0, 1, 2), 0)
    assert committed == (True,)
    assert b == Allocation("b", 1, (0, 3), 1)
    assert extension == Extension((Grown("b", (4, 5)),), ())
    assert isinstance(short, OutOfBlocks)
    assert isinstance(claimed, Claim)
    assert (detached, claimed.epoch) == (2, 3)
    assert d == Allocation("d", 1, (1, 2, 4), 0)
    report = await store.audit("pool")
    assert report.violations == ()
    assert (report.num_free, report.num_cached, report.num_held) == (7, 1, 3)


@pytest.mark.parametrize("num_bytes", range(0, 340, 17))
async def test_an_answer_lost_anywhere_changes_nothing(
    store: RedisStore, proxy: Proxy, num_bytes: int
) -> None:
    """The connection breaks after so many bytes of answers; unanswered calls are sent again, in
    order, with the same answers."""
    proxy.answers.left = num_bytes
    await check_walk(store)
    assert proxy.answers.left is None, "the connection did not break"


@pytest.mark.parametrize("num_bytes", range(0, 1300, 100))
async def test_a_request_lost_anywhere_changes_nothing(
    store: RedisStore, proxy: Proxy, num_bytes: int
) -> None:
    """The same for requests that did not arrive, or only in part."""
    proxy.requests.left = num_bytes
    await check_walk(store)
    assert proxy.requests.left is None, "the connection did not break"


async def test_calls_without_a_failure(store: RedisStore, proxy: Proxy) -> None:
    """The tests above compare with it."""
    num_links = proxy.num_links
    await check_walk(store)
    assert proxy.num_links == num_links + 1, "only the connection for reading is new"


async def test_a_client_reconnects_after_the_server_closed_its_connection(
    store: RedisStore, valkey: Valkey
) -> None:
    await store.allocate("pool", "a", "w", 1, [], 2)
    valkey.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert (await store.allocate("pool", "b", "w", 2, [], 2)).block_ids == (2, 3)


async def test_commands_on_an_old_connection_are_never_executed(
    store: RedisStore, proxy: Proxy
) -> None:
    """A commit is stuck on its way; it is sent again, and then retracted. The first one must not
    arrive later and publish a wrong entry."""
    await store.allocate("pool", "a", "w", 1, [], 1)
    proxy.hold()
    assert await store.commit("pool", "a", 1, [(0, HASH)]) == (True,)
    await store.retract("pool", 0, HASH)
    await proxy.let_go()
    assert await store.match("pool", [HASH]) == 0


async def test_waiting_for_free_blocks_survives_a_broken_connection(
    store: RedisStore, proxy: Proxy
) -> None:
    """A renewed subscription wakes every waiter, since it may have missed a message; and it works
    again."""
    await store.allocate("pool", "a", "w", 1, [], 1)
    await store.wait_for_room("pool", 0.05)
    waiting = asyncio.create_task(store.wait_for_room("pool", 60))
    await asyncio.sleep(0)
    proxy.cut()
    async with asyncio.timeout(5):
        await waiting
    waiting = asyncio.create_task(store.wait_for_room("pool", 60))
    await asyncio.sleep(0)
    await store.release("pool", "a", 1)
    async with asyncio.timeout(5):
        await waiting


# The server is gone, or frozen


async def test_a_dead_server_is_unavailable_after_the_limit(own_valkey: Valkey) -> None:
    """Not before the limit: calls may fail for `retry_for_s`, counted for all callers together."""
    store = await RedisStore.connect(own_valkey.url, retry_for_s=0.4)
    await store.register_pool(POOL)
    own_valkey.kill()
    start = time.monotonic()
    results = await asyncio.gather(
        *(store.stats("pool") for _ in range(20)),
        *(store.withdraw("pool", "h") for _ in range(20)),
        return_exceptions=True,
    )
    assert 0.4 <= time.monotonic() - start < 3
    assert {type(result) for result in results} == {StoreUnavailable}
    assert str(own_valkey.socket) in str(results[0])
    await store.close()


async def test_a_frozen_server_is_unavailable_and_then_goes_on(own_valkey: Valkey) -> None:
    """A call that was given up may have been executed; later calls are."""
    store = await RedisStore.connect(own_valkey.url, retry_for_s=0.6)
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    own_valkey.stop()
    with pytest.raises(StoreUnavailable, match="gave up after"):
        await store.allocate("pool", "a", "w", 1, [], 2)
    own_valkey.resume()
    assert (await store.allocate("pool", "a", "w", 1, [], 2)).block_ids == (0, 1)
    assert (await store.audit("pool")).violations == ()
    await store.close()


async def test_a_short_freeze_causes_no_error(own_valkey: Valkey) -> None:
    """It is shorter than the limit, and longer than the wait for one connection."""
    store = await RedisStore.connect(own_valkey.url, retry_for_s=4)
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    own_valkey.stop()
    calls = asyncio.gather(*(store.allocate("pool", h, "w", 1, [], 2) for h in "abc"))
    done, _ = await asyncio.wait([calls], timeout=2.3)
    assert not done
    own_valkey.resume()
    assert [a.block_ids for a in await calls] == [(0, 1), (2, 3), (4, 5)]
    assert (await store.audit("pool")).num_held == 6
    await store.close()


async def test_a_server_out_of_memory_refuses_growth_and_accepts_releases(
    own_valkey: Valkey,
) -> None:
    """Otherwise a full server would stay full."""
    store = await RedisStore.connect(own_valkey.url)
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    await store.allocate("pool", "a", "w", 1, [], 2)
    own_valkey.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        await store.allocate("pool", "b", "w", 2, [], 2)
    await store.release("pool", "a", 1)
    await store.reap("pool", "w")
    assert (await store.stats("pool")).num_free == 11
    await store.close()
