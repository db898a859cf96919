"""The model keeps the laws, the server answers as the model does, and the machine that checks it
finds differences."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from blockstore.memory.blocks import Blocks
from blockstore.memory.holders import Holder
from blockstore.memory.ledger import Ledger
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec, Retained
from blockstore.redis_store import RedisStore
from blockstore.store import BlockStore
from tests.clock import Clock
from tests.conftest import Valkey
from tests.examples import examples
from tests.property.machine import StoresAgree
from tests.property.retaining_machine import RetainingStoresAgree


class ServerClock(Clock):
    """Nobody sets the server's clock: as its time passes, leases and retentions come
    nearer to their ends."""

    def __init__(self, valkey: Valkey) -> None:
        super().__init__()
        self._valkey = valkey

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        leases = self._valkey.command("HGETALL", "{pool}:leases")
        for worker_id, ends_ms in leases.items():
            ends_ms = int(ends_ms) - round(1000 * seconds)
            self._valkey.command("HSET", "{pool}:leases", worker_id, ends_ms)
        for name in self._valkey.command("ZRANGE", "{pool}:retentions", 0, -1):
            self._valkey.command("ZINCRBY", "{pool}:retentions", round(-1000 * seconds), name)


def drive(
    others: Sequence[BlockStore],
    runner: asyncio.Runner,
    max_examples: int,
    *,
    clock: Clock,
    seeded: int | None = None,
    of: type[StoresAgree] = RetainingStoresAgree,
) -> None:
    """Run the machine. AssertionError: two stores differ or a law is broken, with the shortest such
    run. `seeded`: the runs are always the same, and the first one that fails is not shortened.
    `clock`: of all stores. `of`: the machine."""
    known = {"others": tuple(others), "runner": runner, "clock": clock}
    machine = type("Machine", (of,), known)
    if seeded is not None:
        machine = seed(seeded)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate] if seeded is not None else [Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_the_model_keeps_the_laws(runner: asyncio.Runner) -> None:
    drive([], runner, max_examples=examples(50), clock=Clock())


def test_the_server_agrees_with_the_model(valkey: Valkey, runner: asyncio.Runner) -> None:
    store = runner.run(RedisStore.connect(valkey.url))
    try:
        drive([store], runner, max_examples=examples(30), clock=ServerClock(valkey))
    finally:
        runner.run(store.close())


# The machine is able to fail

MOST_EXAMPLES = 3000
"""Some seeds take hundreds of examples until they find a wrong order of evictions. The same seed
may need more of them in another run, since Hypothesis also draws constants of the modules that are
loaded."""


class FreesFromFirstToLast(Ledger):
    def _drop(self, holder: Holder, block_ids: set[int]) -> None:
        for block_id in holder.acquired:
            super()._drop(holder, {block_id} & block_ids)


class DemandsTheFirst(Ledger):
    def _last_in_order(self) -> Holder | None:
        return min(self.holders.values(), key=lambda holder: holder.sort_key, default=None)


class MostRecentFirst(Blocks):
    def take(self, num_blocks: int, holder_id: str) -> list[int]:
        self.cached = dict.fromkeys(reversed(self.cached))
        taken = super().take(num_blocks, holder_id)
        self.cached = dict.fromkeys(reversed(self.cached))
        return taken


class EvictsWhatWasUsedLast(Ledger):
    def __init__(self, spec: PoolSpec, clock: Callable[[], float]) -> None:
        super().__init__(spec, clock)
        self.blocks = MostRecentFirst(spec.num_blocks)


class CommitsHalf(Ledger):
    def commit(
        self, holder_id: str, epoch: int, blocks: Sequence[tuple[int, bytes]]
    ) -> tuple[bool, ...]:
        return tuple(super(CommitsHalf, self).commit(holder_id, epoch, [b])[0] for b in blocks)


class RenewsNoLease(Ledger):
    def register_worker(self, spec: PoolSpec, worker_id: str, lease_ms: int = 0) -> None:
        ends = self.leases.get(worker_id)
        super().register_worker(spec, worker_id, lease_ms)
        if ends is not None:
            self.leases[worker_id] = ends


class ReapsDuringTheLease(Ledger):
    def reap(self, worker_id: str) -> int:
        self.leases.pop(worker_id, None)
        return super().reap(worker_id)


class EvictsRetainedFirst(Ledger):
    def _take(self, num_blocks: int, holder_id: str) -> list[int]:
        self.blocks.cached, self.blocks.kept = self.blocks.kept | self.blocks.cached, {}
        return super()._take(num_blocks, holder_id)


class IgnoresBudgets(Ledger):
    def retain(self, *what: Any) -> Retained:
        owner, name, ttl_ms, hashes, _ = what
        return super().retain(owner, name, ttl_ms, hashes, (9, 9))


class WithoutTenants(Blocks):
    def take(self, num_blocks: int, holder_id: str) -> list[int]:
        return super().take(num_blocks, holder_id.rpartition("/")[2])


class ChargesNoTenant(Ledger):
    def __init__(self, spec: PoolSpec, clock: Callable[[], float]) -> None:
        super().__init__(spec, clock)
        self.blocks = WithoutTenants(spec.num_blocks)


@pytest.mark.parametrize(
    "broken",
    [
        FreesFromFirstToLast,
        DemandsTheFirst,
        EvictsWhatWasUsedLast,
        CommitsHalf,
        RenewsNoLease,
        ReapsDuringTheLease,
        ChargesNoTenant,
    ],
)
def test_a_difference_is_found(broken: type[Ledger], runner: asyncio.Runner) -> None:
    """A store that differs from the model in one detail fails."""
    clock = Clock()
    store = MemoryStore(clock, broken)
    with pytest.raises(AssertionError):
        drive([store], runner, max_examples=MOST_EXAMPLES, clock=clock, seeded=3, of=StoresAgree)


@pytest.mark.parametrize("broken", [EvictsRetainedFirst, IgnoresBudgets])
def test_a_difference_in_retention_is_found(broken: type[Ledger], runner: asyncio.Runner) -> None:
    clock = Clock()
    store = MemoryStore(clock, broken)
    with pytest.raises(AssertionError):
        drive([store], runner, max_examples=MOST_EXAMPLES, clock=clock, seeded=4)
