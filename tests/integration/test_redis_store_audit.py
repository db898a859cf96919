"""The audit of a pool in Redis finds every damage, in one call or in pages."""

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from blockstore.records import Growth, PoolSpec
from blockstore.redis import audit
from blockstore.redis_store import RedisStore
from blockstore.store import FUNCTION_LIBRARY
from tests.conftest import Valkey

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)


def hashes(num: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(num)]


@pytest.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    """A pool with worker w."""
    store = await RedisStore.connect(valkey.url)
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    yield store
    await store.close()


@pytest.fixture
async def audited(store: RedisStore) -> RedisStore:
    """Holder a has 0, 1 (committed) and 2; 3 is cached; 4 was returned; 5 and later ones were never
    used. The hashes of 0 and 1 are retained."""
    await store.allocate("pool", "a", "w", 1, [], 3)
    await store.allocate("pool", "b", "w", 2, [], 2)
    await store.commit("pool", "a", 1, list(zip((0, 1), hashes(2), strict=True)))
    await store.commit("pool", "b", 1, [(3, hashes(3)[2])])
    await store.release("pool", "b", 1)
    await store.retain("pool", "acme", "p", 60_000, hashes(2), (11, 11))
    return store


def ledger(valkey: Valkey, *parts: str | int) -> list[Any]:
    """Parts of the pool's ledger, as the audit reads them."""
    found: list[Any] = valkey.command("FCALL_RO", f"{FUNCTION_LIBRARY}_ledger", 1, "{pool}", *parts)
    return found


@pytest.mark.parametrize("atomic_limit", [11, 10])
@pytest.mark.parametrize(
    ("damage", "violation"),
    [
        (("PING",), None),
        (("HSET", "{pool}:refs", "2", "2"), "block 2 has 1 holders, but its ref count is 2"),
        (("HDEL", "{pool}:refs", "2"), "block 2 has 1 holders, but its ref count is 0"),
        (("HSET", "{pool}:refs", "9", "1"), "refs has 4 entries, 3 of them of blocks in use"),
        (("HDEL", "{pool}:held:a", "2"), "block 2 has 0 holders, but its ref count is 1"),
        (("RPUSH", "{pool}:returned", "2"), "block 2 is in 2 places, not in 1"),
        (("LPOP", "{pool}:returned"), "block 4 is in 0 places, not in 1"),
        (("ZREM", "{pool}:cached", "3"), "block 3 is in 0 places, not in 1"),
        (("HDEL", "{pool}:hashes", "3"), "block 3 is cached without a hash"),
        (("HDEL", "{pool}:index", hashes(1)[0]), "1 hashes|2 hashes are indexed, 3 blocks"),
        (("HSET", "{pool}:index", "another", "1"), "index has 4 entries, 3 of them"),
        (("HINCRBY", "{pool}:pool", "next", "1"), "block 5 is in 0 places, not in 1"),
        (("HSET", "{pool}:waiting", "z", "w"), None),
        (("ZADD", "{pool}:waiters", "1", "z"), "waiter z has worker , which is gone or fenced"),
        (("SADD", "{pool}:demands", "z"), "holder z is demanded, but holds nothing"),
        (("HDEL", "{pool}:retained", hashes(1)[0]), "has 1 retentions, not 0"),
        (("HSET", "{pool}:retained", hashes(3)[2], "1 acme"), "retained has 3 entries, 2 of them"),
        (("HSET", "{pool}:charged", "acme", "5"), "acme retains 2 hashes, but is charged for 5"),
        (("HSET", "{pool}:pool", "retained", "7"), "retained by the header has 7 entries, 2 of"),
        (("ZADD", "{pool}:kept", "1", "3"), "block 3 is in 2 places, not in 1"),
        (("HINCRBY", "{pool}:shares", "~/", "7"), "the uses of tenants' blocks start at"),
        (("HSET", "{pool}:pool", "starts", "7"), "the uses of tenants' blocks start at"),
        (("HINCRBY", "{pool}:shares", "~", "1"), "~ uses 3 blocks, but is charged for 4"),
        (("DEL", "{pool}:retention:acme/p"), "retained has 2 entries, 0 of them"),
    ],
)
async def test_the_audit_finds_every_damage(
    audited: RedisStore,
    valkey: Valkey,
    atomic_limit: int,
    damage: tuple[str | bytes, ...],
    violation: str | None,
) -> None:
    """In one call, and in pages of a few entries."""
    valkey.command(*damage)

    async def read(*parts: str | int) -> list[Any]:
        return ledger(valkey, *parts)

    limits = {"blocks": 2, "returned": 1, "holders": 1, "retentions": 1}
    report = await audit.audit_pool(await audited.stats("pool"), read, atomic_limit, limits)
    assert report.ledger_checked
    if violation is None:
        assert report.violations == ()
        assert (report.num_free, report.num_cached, report.num_held) == (7, 1, 3)
        assert report.num_references == 3
    else:
        assert any(violation.split("|")[-1] in found for found in report.violations)


async def test_an_audit_in_pages_says_so_when_the_pool_keeps_changing(
    audited: RedisStore, valkey: Valkey
) -> None:
    """There are four attempts, each corrupted by a change between its pages; the counters are still
    checked."""
    num_reads = 0

    async def read(*parts: str | int) -> list[Any]:
        nonlocal num_reads
        num_reads += 1
        await audited.allocate("pool", f"h{num_reads}", "w", 1, [], 1)
        await audited.release("pool", f"h{num_reads}", 1)
        return ledger(valkey, *parts)

    stats = await audited.stats("pool")
    report = await audit.audit_pool(stats, read, atomic_limit=1)
    assert num_reads == 2 * 4
    assert not report.ledger_checked
    assert report.violations == ()
    assert (report.num_free, report.num_cached, report.num_held) == (7, 1, 3)
    broken, recovering = replace(stats, num_free=0), replace(stats, num_free=0, recovering=True)
    assert (await audit.audit_pool(broken, read, atomic_limit=1)).violations
    assert not (await audit.audit_pool(recovering, read, atomic_limit=1)).violations


async def test_versions_grow_with_every_change_and_not_with_reading(
    store: RedisStore, valkey: Valkey
) -> None:
    """The paged audit relies on it."""

    def version() -> int:
        return int(valkey.command("HGET", "{pool}:pool", "version"))

    versions = [version()]
    for call in (
        store.allocate("pool", "a", "w", 1, [], 2),
        store.extend("pool", "w", [Growth("a", 1, 2, 3)]),
        store.commit("pool", "a", 1, [(0, hashes(1)[0])]),
        store.give_back("pool", "a", 1, [2]),
        store.detach("pool", "a", 1),
        store.claim("pool", "a", 2, "w"),
        store.release("pool", "a", 3),
        store.retract("pool", 0, hashes(1)[0]),
        store.fence("pool", "w"),
        store.leave("pool", "w"),
        store.reap("pool", "w"),
    ):
        await call
        versions.append(version())
    assert all(before < after for before, after in pairwise(versions))
    await store.match("pool", hashes(1))
    await store.holders("pool")
    await store.audit("pool")
    assert version() == versions[-1]
