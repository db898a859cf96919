"""Arbitrary calls of the stores: both refuse the same ones with a clear error and without a change.
Arbitrary calls of the server's functions: none fails half-way."""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockstore.errors import BY_CODE, InvalidArgument, LedgerError
from blockstore.memory_store import MemoryStore
from blockstore.records import Growth, PoolSpec
from blockstore.redis.library import library_text
from blockstore.redis_store import RedisStore
from blockstore.store import FUNCTION_LIBRARY, BlockStore
from tests.conftest import Valkey
from tests.examples import examples

SPEC = PoolSpec("pool", "model", "fingerprint", num_blocks=8, block_size=4, block_bytes=64)
HASHES = tuple(bytes([number]) * 16 for number in range(4))
FUZZ = settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = st.sampled_from(
    ["w", "h", "rest", "", "nobody", "pool}", "\x00", "ü" * 512, "ü" * 513, "x" * 5000, "\ud800"]
)
NOTHING_THAT_CAN_BE_SENT: st.SearchStrategy[Any] = st.sampled_from([None, (), {}])
NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, -1, 2**31, 2**53 - 1, 2**53, 2**64, 10**400])
FLOATS = st.sampled_from([1.0, 0.5, float("nan"), float("inf")])
ANY_NUMBERS = NUMBERS | NUMBERS | NUMBERS | FLOATS | NOTHING_THAT_CAN_BE_SENT
ANY_TEXTS = TEXTS | TEXTS | TEXTS | NOTHING_THAT_CAN_BE_SENT
ANY_HASHES = st.sampled_from([*HASHES, *HASHES, b"", b"short", bytes(17), bytes(100_000)])
ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "fence": (ANY_TEXTS,),
    "leave": (ANY_TEXTS,),
    "reap": (ANY_TEXTS,),
    "heartbeat": (ANY_TEXTS,),
    "allocate": (ANY_TEXTS, ANY_TEXTS, ANY_NUMBERS, st.lists(ANY_HASHES, max_size=4), ANY_NUMBERS),
    "withdraw": (ANY_TEXTS,),
    "extend": (
        ANY_TEXTS,
        st.lists(st.builds(Growth, ANY_TEXTS, ANY_NUMBERS, ANY_NUMBERS, ANY_NUMBERS), max_size=3),
    ),
    "commit": (ANY_TEXTS, ANY_NUMBERS, st.lists(st.tuples(ANY_NUMBERS, ANY_HASHES), max_size=3)),
    "retract": (ANY_NUMBERS, ANY_HASHES),
    "detach": (ANY_TEXTS, ANY_NUMBERS),
    "claim": (ANY_TEXTS, ANY_NUMBERS, ANY_TEXTS, st.lists(ANY_NUMBERS, max_size=4)),
    "give_back": (ANY_TEXTS, ANY_NUMBERS, st.lists(ANY_NUMBERS, max_size=4)),
    "release": (ANY_TEXTS, ANY_NUMBERS, st.booleans()),
    "match": (st.lists(ANY_HASHES, max_size=4),),
}
CALLS = st.sampled_from(sorted(ARGUMENTS)).flatmap(
    lambda name: st.tuples(st.just(name), st.tuples(*ARGUMENTS[name]))
)
POOLS = st.sampled_from(["pool", "pool", "pool", "pool", "pool", "", "po{o}l", "x" * 2000, "other"])


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def server(valkey: Valkey, runner: asyncio.Runner) -> Iterator[RedisStore]:
    store = runner.run(RedisStore.connect(valkey.url))
    yield store
    runner.run(store.close())


async def prepare(store: BlockStore) -> None:
    """Worker w runs h, and has detached `rest`; one block is cached."""
    await store.drop_pool("pool")
    await store.register_pool(SPEC)
    await store.register_worker(SPEC, "w")
    await store.allocate("pool", "h", "w", 1, HASHES[:2], 3)
    await store.commit("pool", "h", 1, [(0, HASHES[0])])
    await store.allocate("pool", "rest", "w", 2, [], 2)
    await store.detach("pool", "rest", 1)
    await store.allocate("pool", "gone", "w", 3, HASHES[3:], 1)
    await store.commit("pool", "gone", 1, [(5, HASHES[3])])
    await store.release("pool", "gone", 1)


async def outcome(store: BlockStore, name: str, pool_id: str, args: Sequence[Any]) -> object:
    """The answer or the kind of error. Three errors count as equal for an impossible argument: one
    that cannot be sent is Python's TypeError or UnicodeError."""
    try:
        return await getattr(store, name)(pool_id, *args)
    except (InvalidArgument, TypeError, UnicodeError):
        return InvalidArgument
    except LedgerError as error:
        return type(error)


async def shown(store: BlockStore) -> object:
    return await store.stats("pool"), await store.holders("pool")


@given(calls=st.lists(st.tuples(CALLS, POOLS), min_size=1, max_size=6))
@FUZZ
def test_stores_refuse_the_same_calls_and_change_nothing(
    server: RedisStore,
    runner: asyncio.Runner,
    calls: Sequence[tuple[tuple[str, tuple[Any, ...]], str]],
) -> None:
    """Wrong types, negative, huge, empty, NaN, not Unicode, and repeated values."""

    async def drive() -> None:
        stores: tuple[BlockStore, BlockStore] = (MemoryStore(), server)
        for store in stores:
            await prepare(store)
        for (name, args), pool_id in calls:
            before = await shown(stores[0])
            outcomes = [await outcome(store, name, pool_id, args) for store in stores]
            views = [await shown(store) for store in stores]
            assert views[0] == views[1]
            if InvalidArgument in outcomes:
                assert views[0] == before
            if pool_id == "pool":
                assert outcomes[0] == outcomes[1], name
        for store in stores:
            assert (await store.audit("pool")).violations == ()

    runner.run(drive())


NAMES = [line.split("'")[1] for line in library_text().splitlines() if line.startswith("define('")]
RAW = st.sampled_from(
    [
        *(b"w", b"h", b"rest", b"", b"pool", b"0", b"1", b"2", b"8", b"-1", b"+1", b"007", b"1e3"),
        *(b"0x10", b" 1", b"1 ", b"nan", b"inf", b"9007199254740992", b"9" * 400, b"1.5", b"\xff"),
        *(HASHES[0], HASHES[3], bytes(16), bytes(15), b"blocks", b"people", b"sizes", b"holders"),
        *(b"x" * 3000, b"\x00"),
    ]
)
KEYS = st.sampled_from([[b"{pool}"]] * 9 + [[], [b"pool"], [b"{}"], [b"{pool}", b"{pool}"]])


@given(name=st.sampled_from(NAMES), keys=KEYS, args=st.lists(RAW, max_size=9))
@FUZZ
def test_no_function_fails_half_way(
    valkey: Valkey,
    server: RedisStore,
    runner: asyncio.Runner,
    name: str,
    keys: list[bytes],
    args: list[bytes],
) -> None:
    """Calls without the client: each gets an answer or a known code, and the ledger stays
    consistent."""
    runner.run(prepare(server))
    try:
        valkey.command("FCALL", f"{FUNCTION_LIBRARY}_{name}", len(keys), *keys, *args)
        code = ""
    except redis.ResponseError as error:
        code = str(error).split()[0]
    assert code in ("", *BY_CODE)
    if name != "drop_pool":
        assert runner.run(_awaited(server.audit("pool"))).violations == ()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def test_all_functions_are_called() -> None:
    assert len(NAMES) > 15
