"""Retained prefixes are retained again, for the time that is left, in a ledger that was rebuilt."""

import pytest

from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from services.block_manager.retention_copies import RetentionCopies
from services.block_manager.rounds import Connection
from services.block_manager.survey import survey
from tests.clock import Clock
from tests.memory_registry import MemoryRegistry

from .conftest import H0, H1, H2

SPEC = PoolSpec("pool", "model", "fingerprint", 11, 4, 1)
WIDE = 11, 11


class Pool:
    """A pool that loses its ledger, and the copies of its retentions."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore(clock=self.clock)
        self.copies = RetentionCopies(self.clock)
        self._epoch = 1

    async def round(self) -> None:
        connection = Connection(self.store, MemoryRegistry())
        await self.copies.update(await survey(connection), connection)

    async def lose(self) -> None:
        self._epoch += 1
        self.store = MemoryStore(clock=self.clock)
        await self.round()  # the server does not know the pool yet
        await self.store.recover_pool(SPEC, self._epoch, ())
        await self.round()  # the ledger is not whole yet
        await self.store.reopen("pool")

    async def retain(self, name: str, *hashes: bytes, seconds: int = 60) -> None:
        await self.store.retain("pool", "acme", name, 1000 * seconds, hashes, WIDE)

    async def retained(self) -> dict[str, tuple[int, tuple[bytes, ...]]]:
        """The milliseconds that are left and the hashes of each retention."""
        found = await self.store.retentions("pool", with_hashes=True)
        return {each.name: (each.left_ms, each.hashes) for each in found}


@pytest.fixture
async def pool() -> Pool:
    made = Pool()
    await made.store.register_pool(SPEC)
    return made


async def test_retentions_outlive_their_ledger_with_the_time_that_is_left(pool: Pool) -> None:
    await pool.retain("long", H0, H1)
    await pool.retain("short", H2, seconds=20)
    await pool.round()
    for _ in range(2):
        pool.clock.advance(15)
        await pool.lose()
        await pool.round()
    assert await pool.retained() == {"long": (30_000, (H0, H1))}
    assert (await pool.store.audit("pool")).violations == ()


async def test_a_client_that_retains_in_the_new_ledger_is_not_overruled(pool: Pool) -> None:
    await pool.retain("p", H0, H1)
    await pool.round()
    await pool.lose()
    await pool.retain("p", H2, seconds=5)
    await pool.round()
    assert await pool.retained() == {"p": (5_000, (H2,))}


async def test_what_was_dropped_does_not_return(pool: Pool) -> None:
    await pool.retain("p", H0)
    await pool.round()
    await pool.store.end_retention("pool", "acme", "p")
    pool.clock.advance(1)
    await pool.round()
    await pool.lose()
    await pool.round()
    assert await pool.retained() == {}
