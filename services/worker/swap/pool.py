"""The colder pool beside a worker's own: KV is swapped out to it, and comes back.

A colder pool is a pool like any other, with a ledger, stamps and locks of its own. What is swapped
out there is a holder at rest, its full blocks stamped and in the colder pool's own prefix index: a
prefix that is there already is shared, not copied again. The sequences of a group share there what
they have in common, and do again when they are back.

    put     allocate there -> copy -> stamp, commit -> detach: at rest until somebody claims it
    fetch   claim it -> compare stamps -> copy what the own pool has not cached -> release it

See ADR 53.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from blockstore.errors import MustWait, NotHeld, OutOfBlocks, StaleHolder
from blockstore.records import Allocation, Claim, PoolSpec, PrefixHash
from blockstore.store import BlockStore
from services.common.pool.stamps import Stamps
from services.common.runtime.logging import get_logger
from services.common.runtime.metrics import WorkerMetrics
from services.engine.sequences.block_keys import Begun, BlockKeys, Key
from services.protocol.ticket import Swapped, SwappedTable, Ticket
from services.worker.swap.cost import SwapCost

Copy = Callable[[Sequence[tuple[int, int]]], None]
"""Copies blocks, (source, target) each, from one of the two arenas to the other."""

log = get_logger(__name__)


class StampedPool(Protocol):
    """A membership in a pool, as far as its blocks are concerned."""

    @property
    def spec(self) -> PoolSpec: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def stamps(self) -> Stamps: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """`begun`: where each sequence begins with what the worker's own blocks have now, cached or
    copied. `num_blocks`: those that have been written. `completed`: full ones among them, to
    commit."""

    begun: Sequence[Begun]
    num_blocks: int = 0
    completed: tuple[tuple[int, PrefixHash], ...] = ()


class SwapPool:
    """Copies run one at a time in a thread of their own, beside the steps: they touch only blocks
    that no step touches. `copy_out` copies to the colder arena, `copy_back` from it. Where the
    costs are not compared, swapping is always worth it."""

    def __init__(
        self,
        store: BlockStore,
        own: StampedPool,
        swap_pool: StampedPool,
        copy_out: Copy,
        copy_back: Copy,
        metrics: WorkerMetrics,
        compares_costs: bool = True,
    ) -> None:
        self.spec = swap_pool.spec
        self.cost = SwapCost()
        self._store = store
        self._worker_id = swap_pool.worker_id
        self._own_stamps = own.stamps
        self._stamps = swap_pool.stamps
        self._copy_out = copy_out
        self._copy_back = copy_back
        self._metrics = metrics
        self._compares_costs = compares_costs
        self._thread = ThreadPoolExecutor(1, "copier")

    def holds(self, ticket: Ticket) -> bool:
        """Whether it was swapped out to blocks that can be this pool's."""
        swapped, size = ticket.swapped, self.spec.block_size
        if swapped is None or swapped.pool_id != self.spec.pool_id:
            return False
        num_prompt_tokens = len(ticket.prompt_token_ids)
        return max(swapped.block_ids) < self.spec.num_blocks and all(
            len(table) == -(-(num_prompt_tokens + len(state.token_ids) - 1) // size)
            for state, table in zip(ticket.sequences, _tables(ticket, swapped), strict=True)
        )

    def is_worthwhile(self, num_blocks: int, num_tokens: int, prefill_ns_per_token: int) -> bool:
        """Whether copying so many blocks out and back beats computing so many tokens again."""
        cost = self.cost.is_below(num_blocks, num_tokens, prefill_ns_per_token)
        return cost or not self._compares_costs

    async def put(self, ticket: Ticket) -> Swapped | None:
        """Copy the KV of sequences that no step touches any more, all or nothing; what several have
        in common once. None: the colder pool has no room for it. The holder there has the same id
        as the one in the own pool."""
        began = time.perf_counter()
        contents = BlockKeys.of(ticket, self.spec.block_size, num_left_out=1)
        sources = contents.blocks([state.block_ids for state in ticket.sequences])
        allocation = await self._allocate(ticket, contents, len(sources))
        if allocation is None:
            return None
        pool_id, holder_id, epoch = self.spec.pool_id, ticket.holder_id, allocation.epoch
        targets = allocation.cached(*contents.chains)
        if wrong := contents.first_wrong(self._stamps, targets):
            await self._distrust(targets[wrong], wrong)
            await self._store.release(pool_id, holder_id, epoch)
            return None
        missing = (key for key in sources if key not in targets)
        new = allocation.block_ids[allocation.num_cached_blocks :]
        copied = dict(zip(missing, new, strict=True))
        copies = self._copy_out, self._stamps, contents, sources, copied
        copying_s = await self._copy(*copies)
        await self._store.commit(pool_id, holder_id, epoch, contents.full_among(copied))
        epoch = await self._store.detach(pool_id, holder_id, epoch)
        self._metrics.swapped_out_blocks.inc(len(copied))
        self.cost.observe(len(copied), copying_s, time.perf_counter() - began)
        targets |= copied
        tables = (
            SwappedTable(state.index, tuple(targets[key] for key in contents.keys_of(number)))
            for number, state in enumerate(ticket.sequences)
        )
        return Swapped(pool_id, holder_id, epoch, tuple(tables))

    async def fetch(self, ticket: Ticket, allocation: Allocation, contents: BlockKeys) -> Fetched:
        """Copy back what the own pool's cache has not, into new blocks of `allocation`, which was
        asked for with `contents`. It is less than was swapped out, down to nothing, where the
        colder blocks are gone or say something else: the rest is computed."""
        assert ticket.swapped is not None
        swapped, cached = ticket.swapped, allocation.cached(*contents.chains)
        holder = swapped.pool_id, swapped.holder_id
        try:
            claim = await self._store.claim(
                *holder, swapped.holder_epoch, self._worker_id, swapped.block_ids
            )
        except (StaleHolder, NotHeld):
            return Fetched(contents.begun(cached))
        computed = BlockKeys.of(ticket, self.spec.block_size, num_left_out=1)
        sources: dict[Key, int] = {}
        if self._are_in_place(swapped, claim):
            sources = computed.blocks(_tables(ticket, swapped))
            await self._leave_out_unsound(sources, computed, swapped.holder_id)
        new = allocation.block_ids[allocation.num_cached_blocks :]
        begun, copied = contents.begun_with(cached, computed, sources, new)
        if copied:
            await self._copy(self._copy_back, self._own_stamps, computed, sources, copied)
            self._metrics.swapped_in_blocks.inc(len(copied))
        await self._store.release(*holder, claim.epoch)
        return Fetched(begun, len(copied), computed.full_among(copied))

    async def release(self, swapped: Swapped) -> None:
        """Let go of what is at rest there. StaleHolder: somebody has claimed it."""
        await self._store.release(swapped.pool_id, swapped.holder_id, swapped.holder_epoch)

    def close(self) -> None:
        """Copy nothing any more."""
        self._thread.shutdown()

    async def _allocate(
        self, ticket: Ticket, contents: BlockKeys, num_blocks: int
    ) -> Allocation | None:
        pool_id, holder_id = self.spec.pool_id, ticket.holder_id
        hashes, branches = contents.chains
        asked = self._worker_id, ticket.order, hashes, num_blocks, branches
        try:
            return await self._store.allocate(pool_id, holder_id, *asked)
        except (OutOfBlocks, MustWait):
            await self._store.withdraw(pool_id, holder_id)
            return None
        except StaleHolder:  # something of this name was there before
            return None

    def _are_in_place(self, swapped: Swapped, claim: Claim) -> bool:
        """Whether its blocks stand as they were put: in each table as acquired, and unfinished ones
        sequence by sequence, all of them. (Finished ones say themselves what they hold.)"""
        places = {block_id: number for number, block_id in enumerate(claim.block_ids)}
        tables = ([places[b] for b in table.block_ids] for table in swapped.tables)
        named, held = (
            [b for b in block_ids if not self._stamps.is_committed(b)]
            for block_ids in (swapped.block_ids, claim.block_ids)
        )
        return named == held and all(table == sorted(table) for table in tables)

    async def _leave_out_unsound(
        self, sources: dict[Key, int], contents: BlockKeys, owner: str
    ) -> None:
        """Full blocks whose stamps are not of these tokens, others that are not the owner's
        (law 6)."""
        while wrong := contents.first_wrong(self._stamps, sources):
            await self._distrust(sources.pop(wrong), wrong)
        for tail in contents.tails:
            if tail in sources and not self._stamps.are_written_by([sources[tail]], owner):
                del sources[tail]

    async def _distrust(self, block_id: int, prefix_hash: PrefixHash) -> None:
        log.error("kv_corrupt", pool_id=self.spec.pool_id, block_id=block_id)
        self._metrics.kv_corrupt.inc()
        await self._store.retract(self.spec.pool_id, block_id, prefix_hash)

    async def _copy(
        self,
        copy: Copy,
        stamps: Stamps,
        contents: BlockKeys,
        sources: Mapping[Key, int],
        targets: Mapping[Key, int],
    ) -> float:
        """In the order of law 6: KV, stamp. (The owner came with the blocks.) How many seconds it
        took."""

        def work() -> float:
            began = time.perf_counter()
            copy([(sources[key], target) for key, target in targets.items()])
            for run in contents.runs:
                run.stamp(stamps.complete, targets)
            return time.perf_counter() - began

        return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], float]) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _tables(ticket: Ticket, swapped: Swapped) -> list[tuple[int, ...]]:
    """Of the sequences that go on."""
    tables = {table.index: table.block_ids for table in swapped.tables}
    return [tables[state.index] for state in ticket.sequences]
