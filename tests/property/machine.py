"""One state machine drives the model and the server side by side: the same calls give the same
answers and errors. Some replies are lost, and their calls are sent again. After each step laws 1
and 3 hold in both, and both have the same contents."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockstore.errors import LedgerError, OutOfBlocks
from blockstore.memory.holders import Holder
from blockstore.memory.ledger import Ledger
from blockstore.memory_store import MemoryStore
from blockstore.records import Growth, PoolSpec
from blockstore.store import NO_TENANT, BlockStore, tenant_of
from tests.clock import Clock
from tests.property.lost_ledger import content_of, reported_by
from tests.property.machine_inputs import (
    BRANCHES,
    EPOCH_OFF_BY,
    HASHES,
    HASHES_OF,
    LEASES_S,
    LOST,
    PROMPTS,
    SPECS,
    TENANTS,
    Asked,
)

STEP_S = 7.0
"""How far the clock moves at a time. No lease ends within 3 s of such a step, so the time that the
test itself takes does not matter."""
_TOMBSTONES_LAST_S = 500.0

Call = Callable[[BlockStore], Awaitable[object]]


class StoresAgree(RuleBasedStateMachine):
    """The machine reads its knowledge of holders from the model's ledger, so that most calls name
    existing ones; ids, epochs, owners and blocks are sometimes a little wrong."""

    runner: asyncio.Runner
    others: tuple[BlockStore, ...] = ()
    """The stores that are compared with the model, on the loop of `runner`."""
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.model = MemoryStore(self.clock)
        self.began = self.clock()
        self.stores = (self.model, *self.others)
        self.asked: dict[str, Asked] = {}
        self.num_workers = 0

    @initialize(spec=SPECS)
    def start(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.send(lambda store: store.register_pool(spec), lost=True)
        self.join(lost=False)
        self.join(lost=True)

    def teardown(self) -> None:
        self.send(lambda store: store.drop_pool("pool"), lost=True)

    # Calling

    def send(self, call: Call, lost: bool) -> object:
        """Send a call to all stores; returns their common answer. `lost`: the first answer was
        lost, and the call is sent twice."""
        for _ in range(1 + lost):
            first, *rest = [self.runner.run(_outcome(call(store))) for store in self.stores]
            for outcome in rest:
                assert outcome == first
        return first

    # Drawing

    @property
    def ledger(self) -> Ledger:
        return self.model.ledger("pool")

    def some_worker(self, data: st.DataObject) -> str:
        """A worker that exists, or the last one that left."""
        return data.draw(st.sampled_from([*sorted(self.ledger.workers), "nobody"]), "worker")

    def some_holder(self, data: st.DataObject) -> tuple[str, int, Holder | None]:
        """(id, epoch, holder if it exists) of a present, a past or an unknown holder."""
        there = st.sampled_from(sorted(self.ledger.holders) or ["nobody"])
        known = st.sampled_from([*self.asked, "nobody"])
        holder_id = data.draw(there | there | there | known, "holder")
        holder = self.ledger.holders.get(holder_id)
        epoch = holder.epoch if holder else self.ledger.released.epochs.get(holder_id, 1)
        return holder_id, epoch + data.draw(EPOCH_OFF_BY, "epoch off by"), holder

    def new_holder(self, tenant: str) -> str:
        return ("" if tenant == NO_TENANT else f"{tenant}/") + f"h{len(self.asked)}"

    def some_blocks(self, data: st.DataObject, holder: Holder | None) -> list[int]:
        """Mostly the holder's own blocks."""
        any_block = st.integers(0, self.spec.num_blocks - 1)
        own = st.sampled_from(holder.acquired) if holder and holder.acquired else any_block
        return data.draw(st.lists(own | own | own | any_block, unique=True, max_size=4), "blocks")

    # Workers

    @rule(lost=LOST)
    def join(self, lost: bool) -> None:
        worker_id, self.num_workers = f"w{self.num_workers}", self.num_workers + 1
        self.send(lambda store: store.register_worker(self.spec, worker_id), lost)

    @rule(number=st.integers(0, 5), wrong=st.sampled_from(["", "", "num_blocks", "fingerprint"]))
    def join_again(self, number: int, wrong: str) -> None:
        """A fenced or reaped worker may join again, too."""
        spec = self.spec
        if wrong == "num_blocks":
            spec = replace(spec, num_blocks=99)
        elif wrong == "fingerprint":
            spec = replace(spec, fingerprint="other")
        self.send(lambda store: store.register_worker(spec, f"w{number}"), lost=False)

    # Members on other hosts

    @rule(lease_s=LEASES_S, lost=LOST)
    def join_remotely(self, lease_s: int, lost: bool) -> None:
        worker_id, self.num_workers = f"w{self.num_workers}", self.num_workers + 1
        self.renew(worker_id, lease_s, lost)

    @rule(data=st.data(), lease_s=LEASES_S, lost=LOST)
    def renew_again(self, data: st.DataObject, lease_s: int, lost: bool) -> None:
        """Also one that has ended, was fenced, or had no lease."""
        others = st.sampled_from([f"w{number}" for number in range(6)])
        remote = st.sampled_from(sorted(self.ledger.leases) or ["w0"])
        self.renew(data.draw(remote | remote | others, "member"), lease_s, lost)

    def renew(self, worker_id: str, lease_s: int, lost: bool) -> None:
        lease_ms = 1000 * lease_s
        self.send(
            lambda store: store.register_worker(self.spec, worker_id, lease_ms=lease_ms), lost
        )

    @rule(num_steps=st.integers(1, 3))
    def wait(self, num_steps: int) -> None:
        if self.clock() - self.began < _TOMBSTONES_LAST_S:
            self.clock.advance(num_steps * STEP_S)

    @rule(data=st.data(), renews=st.booleans(), lease_s=LEASES_S, lost=LOST)
    def give_up(self, data: st.DataObject, renews: bool, lease_s: int, lost: bool) -> None:
        """The block manager tries to reap a member that may have renewed its lease meanwhile, and
        another worker to claim what it held."""
        if not self.ledger.leases:
            self.join_remotely(lease_s, lost)
        if not self.ledger.leases:
            return  # the name was reaped before, so it could not join
        worker_id = data.draw(st.sampled_from(sorted(self.ledger.leases)), "member")
        if renews:
            self.wait(1)
            self.renew(worker_id, lease_s, lost)
        held = (h for h in self.ledger.holders.values() if h.worker_id == worker_id)
        holder = next(held, None)
        self.wait(data.draw(st.integers(1, 3), "steps"))
        self.send(lambda store: store.reap("pool", worker_id), lost)
        other = self.some_worker(data)
        if holder is not None:
            held_at = holder.holder_id, holder.epoch
            self.send(lambda store: store.claim("pool", *held_at, other), lost)

    @rule(data=st.data(), end=st.sampled_from(["fence", "leave", "reap"]), lost=LOST)
    def end(self, data: st.DataObject, end: str, lost: bool) -> None:
        worker_id = self.some_worker(data)
        self.send(lambda store: getattr(store, end)("pool", worker_id), lost)

    # Holders

    @rule(
        data=st.data(),
        tenant=TENANTS,
        order=st.integers(0, 6),
        prompt=st.sampled_from(PROMPTS),
        num_hashes=st.integers(0, 4),
        branches=BRANCHES,
        num_more=st.integers(0, 3) | st.none(),
        patient=st.booleans(),
        lost=LOST,
    )
    def allocate(
        self,
        data: st.DataObject,
        tenant: str,
        order: int,
        prompt: tuple[int, ...],
        num_hashes: int,
        branches: list[tuple[int, ...]],
        num_more: int | None,
        patient: bool,
        lost: bool,
    ) -> None:
        """`num_more` None: all that is available, so that all cached blocks are evicted in their
        order. An allocation that may not wait withdraws, and does not delay the others."""
        own = HASHES_OF[tenant]
        hashes = tuple(own[number] for number in prompt[:num_hashes])
        behind = tuple(tuple(own[number] for number in branch) for branch in branches)
        num_named = len(set(hashes).union(*behind))
        if num_more is None:
            num_more = max(0, self.ledger.blocks.num_available - num_named)
        asked = Asked(self.some_worker(data), order, hashes, num_named + num_more, behind)
        holder_id = self.new_holder(tenant)
        self.asked[holder_id] = asked
        self.ask(holder_id, asked, lost)
        if not patient:
            self.send(lambda store: store.withdraw("pool", holder_id), lost)

    @rule(prompt=st.sampled_from(PROMPTS), num_hashes=st.integers(1, 4), data=st.data())
    def serve(self, prompt: tuple[int, ...], num_hashes: int, data: st.DataObject) -> None:
        """A whole request, first in line: its prompt stays in the cache."""
        tenant = data.draw(TENANTS, "tenant")
        hashes = tuple(HASHES_OF[tenant][number] for number in prompt[:num_hashes])
        asked = Asked(self.some_worker(data), 0, hashes, len(hashes))
        holder_id = self.new_holder(tenant)
        self.asked[holder_id] = asked
        self.ask(holder_id, asked, lost=False)
        holder = self.ledger.holders.get(holder_id)
        if holder:
            blocks = list(zip(holder.acquired, hashes, strict=True))
            self.send(lambda store: store.commit("pool", holder_id, 1, blocks), lost=False)
        self.send(lambda store: store.release("pool", holder_id, 1), lost=False)
        self.send(lambda store: store.withdraw("pool", holder_id), lost=False)

    @rule(data=st.data(), lost=LOST)
    def allocate_again(self, data: st.DataObject, lost: bool) -> None:
        """A repeated call for a waiting, served or released holder; sometimes by another worker."""
        if self.asked:
            waiting = st.sampled_from(sorted(self.ledger.waiters) or list(self.asked))
            holder_id = data.draw(waiting | st.sampled_from(list(self.asked)), "holder")
            asked = self.asked[holder_id]
            other = replace(asked, worker_id=self.some_worker(data), order=max(0, asked.order - 1))
            self.ask(holder_id, data.draw(st.sampled_from([asked, asked, other])), lost)

    def ask(self, holder_id: str, asked: Asked, lost: bool) -> None:
        whose = holder_id, asked.worker_id, asked.order
        what = asked.hashes, asked.num_blocks, asked.branches
        self.send(lambda store: store.allocate("pool", *whose, *what), lost)

    @rule(data=st.data(), lost=LOST)
    def withdraw(self, data: st.DataObject, lost: bool) -> None:
        waiting = st.sampled_from(sorted(self.ledger.waiters) or ["nobody"])
        holder_id = data.draw(waiting, "waiter")
        self.send(lambda store: store.withdraw("pool", holder_id), lost)

    @rule(data=st.data(), num_growths=st.integers(0, 4), lost=LOST)
    def extend(self, data: st.DataObject, num_growths: int, lost: bool) -> None:
        worker_id = self.some_worker(data)
        growths = []
        for _ in range(num_growths):
            holder_id, epoch, holder = self.some_holder(data)
            num_acquired = len(holder.acquired) if holder else 0
            have = data.draw(st.integers(0, num_acquired), "have")
            total = data.draw(st.integers(have, num_acquired + 3), "total")
            growths.append(Growth(holder_id, epoch, have, total))
        self.send(lambda store: store.extend("pool", worker_id, growths), lost)

    @rule(data=st.data(), lost=LOST)
    def extend_own(self, data: st.DataObject, lost: bool) -> None:
        """All holders of a worker grow by one block, as in a decode step."""
        worker_id = self.some_worker(data)
        own = [h for h in self.ledger.holders.values() if h.worker_id == worker_id]
        growths = [Growth(h.holder_id, h.epoch, len(h.acquired), len(h.acquired) + 1) for h in own]
        self.send(lambda store: store.extend("pool", worker_id, growths), lost)

    @rule(data=st.data(), lost=LOST)
    def commit(self, data: st.DataObject, lost: bool) -> None:
        holder_id, epoch, holder = self.some_holder(data)
        block_ids = self.some_blocks(data, holder)
        own = HASHES_OF[tenant_of(holder_id)]
        hashes = st.lists(st.sampled_from(own), min_size=4, max_size=4)
        blocks = list(zip(block_ids, data.draw(hashes, "hashes"), strict=False))
        self.send(lambda store: store.commit("pool", holder_id, epoch, blocks), lost)

    @rule(data=st.data(), finish=st.booleans(), lost=LOST)
    def commit_prompt(self, data: st.DataObject, finish: bool, lost: bool) -> None:
        """Commit the prompt's full blocks, as a prefill worker does; `finish`: then release them,
        so that they stay cached."""
        holder_id, epoch, holder = self.some_holder(data)
        if holder and holder_id in self.asked:
            hashes = self.asked[holder_id].hashes
            blocks = list(dict(zip(holder.acquired, hashes, strict=False)).items())
            self.send(lambda store: store.commit("pool", holder_id, epoch, blocks), lost)
        if finish:
            self.send(lambda store: store.release("pool", holder_id, epoch), lost)

    @rule(data=st.data(), block_id=st.integers(0, 8), lost=LOST)
    def retract(self, data: st.DataObject, block_id: int, lost: bool) -> None:
        right = self.ledger.blocks.hash_of.get(block_id, HASHES[0])
        prefix_hash = data.draw(st.sampled_from([right, right, HASHES[1]]), "hash")
        self.send(lambda store: store.retract("pool", block_id, prefix_hash), lost)

    @rule(data=st.data(), lost=LOST)
    def detach(self, data: st.DataObject, lost: bool) -> None:
        holder_id, epoch, _ = self.some_holder(data)
        self.send(lambda store: store.detach("pool", holder_id, epoch), lost)

    @rule(data=st.data(), lost=LOST)
    def claim(self, data: st.DataObject, lost: bool) -> None:
        holder_id, epoch, _ = self.some_holder(data)
        worker_id = self.some_worker(data)
        self.send(lambda store: store.claim("pool", holder_id, epoch, worker_id), lost)

    @rule(data=st.data(), lost=LOST)
    def give_back(self, data: st.DataObject, lost: bool) -> None:
        holder_id, epoch, holder = self.some_holder(data)
        block_ids = self.some_blocks(data, holder)
        self.send(lambda store: store.give_back("pool", holder_id, epoch, block_ids), lost)

    @rule(data=st.data(), comes_back=st.booleans(), lost=LOST)
    def release(self, data: st.DataObject, comes_back: bool, lost: bool) -> None:
        holder_id, epoch, _ = self.some_holder(data)
        self.send(lambda store: store.release("pool", holder_id, epoch, comes_back), lost)

    # The server loses everything

    @rule(data=st.data(), private=st.sets(st.integers(0, 8)), lost=LOST)
    def recover(self, data: st.DataObject, private: set[int], lost: bool) -> None:
        """Some workers report their holders, some are stuck or dead; the stamps have the rest."""
        old, spec = self.ledger, self.spec
        workers, epoch = sorted(old.workers), old.ledger_epoch + 1
        self.send(lambda store: store.drop_pool("pool"), lost)
        self.send(lambda store: store.recover_pool(spec, epoch, workers), lost)
        for worker_id in data.draw(st.permutations(workers), "order"):
            how = data.draw(st.sampled_from(["reassert", "reassert", "fence", "reap"]), worker_id)
            self.reassert_holders(old, worker_id, how, lost)
        contents = [content_of(old, block_id, private) for block_id in range(spec.num_blocks)]
        cut = data.draw(st.integers(0, spec.num_blocks), "cut")
        self.send(lambda store: store.restore("pool", 0, contents[:cut]), lost)
        self.shows_the_same()
        self.send(lambda store: store.reopen("pool"), lost)
        self.send(lambda store: store.restore("pool", cut, contents[cut:]), lost)
        self.send(lambda store: store.reopen("pool"), lost)

    def reassert_holders(self, old: Ledger, worker_id: str, how: str, lost: bool) -> None:
        report = reported_by(old, worker_id)
        if how == "reassert":
            self.send(lambda store: store.reassert(self.spec, *report), lost)
        else:
            self.send(lambda store: getattr(store, how)("pool", worker_id), lost)

    # Looking

    @invariant()
    def shows_the_same(self) -> None:
        worker_ids = [*self.ledger.workers, "nobody"]
        self.send(lambda store: _view(store, worker_ids), lost=False)

    @invariant()
    def laws_hold(self) -> None:
        for store in self.stores:
            self.runner.run(_laws_hold(store, self.spec.num_blocks))


async def _outcome(awaitable: Awaitable[object]) -> object:
    """The answer, or the error with the numbers that belong to the contract."""
    try:
        return await awaitable
    except OutOfBlocks as error:
        return type(error), error.needed, error.available
    except LedgerError as error:
        return type(error)


async def _view(store: BlockStore, worker_ids: Sequence[str]) -> object:
    """All readable contents of the pool."""
    return (
        await store.stats("pool"),
        await _outcome(store.holders("pool")),
        await store.retentions("pool", with_hashes=True),
        [await store.match("pool", [prefix_hash]) for prefix_hash in HASHES],
        [await _outcome(store.heartbeat("pool", worker_id)) for worker_id in worker_ids],
    )


async def _laws_hold(store: BlockStore, num_blocks: int) -> None:
    report = await store.audit("pool")
    assert report.ledger_checked
    assert report.violations == ()
    assert report.num_free + report.num_cached + report.num_held == num_blocks
    worker_ids = (await store.stats("pool")).worker_ids
    assert {holder.worker_id for holder in await store.holders("pool")} <= set(worker_ids)
