"""Copies the KV of preempted requests to the swap pool and back.

The swap pool is a pool like any other, with a ledger, stamps and locks of its own. A swapped-out
request has a detached holder there. Its full blocks are stamped and in the swap pool's own prefix
index, so a prefix that is there already is shared, not copied again. The sequences of a group share
blocks in the swap pool as in the worker's pool, and share them again when they are back.

    put     allocate there -> copy -> stamp, commit -> detach
    fetch   claim -> compare stamps -> copy the blocks that are not cached here -> release

See ADR 53.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

from blockstore.errors import MustWait, NotHeld, OutOfBlocks, StaleHolder
from blockstore.records import Allocation, Claim, PrefixHash
from blockstore.store import BlockStore
from services.pool.stamps import Stamps
from services.protocol.block_keys import BlockKeys, ComputedBlocks, Key, num_tokens_of
from services.protocol.ticket import Swapped, SwappedTable, Ticket
from services.runtime.logging import get_logger
from services.runtime.metrics import WorkerMetrics
from services.worker.membership import Membership
from services.worker.swap.cost import SwapCost

Copy = Callable[[Sequence[tuple[int, int]]], None]
"""Copies blocks, given as (source, target) pairs, from one of the two arenas to the other."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch."""

    computed: Sequence[ComputedBlocks]
    """The leading blocks of each sequence that now have its KV in the worker's pool."""
    num_blocks: int = 0
    """The number of blocks that were copied."""
    completed: tuple[tuple[int, PrefixHash], ...] = ()
    """The full blocks among them, to commit."""


class SwapPool:
    """Moves KV between a worker's own pool and the swap pool.

    Copies run one at a time in a thread of their own, beside the steps; they touch only blocks that
    no step touches. `copy_out` copies to the swap pool's arena, `copy_back` from it. Without
    `compares_costs`, swapping always counts as worthwhile.
    """

    def __init__(
        self,
        store: BlockStore,
        own: Membership,
        swap_pool: Membership,
        copy_out: Copy,
        copy_back: Copy,
        metrics: WorkerMetrics,
        compares_costs: bool = True,
        check_fence: Callable[[], None] = lambda: None,
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
        self._check_fence = check_fence
        self._thread = ThreadPoolExecutor(1, "copier")

    def holds(self, ticket: Ticket) -> bool:
        """Whether a ticket was swapped out to this pool, with block ids and table lengths that are
        possible. (Only the claim shows whether the blocks are still there.)"""
        swapped, size = ticket.swapped, self.spec.block_size
        if swapped is None or swapped.pool_id != self.spec.pool_id:
            return False
        num_prompt_tokens = len(ticket.prompt_token_ids)
        return max(swapped.block_ids) < self.spec.num_blocks and all(
            len(table) == -(-(num_prompt_tokens + len(state.token_ids) - 1) // size)
            for state, table in zip(ticket.sequences, _tables(ticket, swapped), strict=True)
        )

    def is_worthwhile(self, ticket: Ticket, others: Iterable[Ticket]) -> bool:
        """Whether to copy the KV of a preempted request out and back rather than compute it again.

        Only blocks that no other running request (`others`) shares count: they go to an earlier
        request at once. Shared blocks stay in the pool.
        """
        size = self.spec.block_size
        with_kv = (s.block_ids[: -(-s.num_computed_tokens // size)] for s in ticket.sequences)
        own = set(chain.from_iterable(with_kv))
        for other in others:
            own.difference_update(*(state.block_ids for state in other.sequences))
        num_computed = num_tokens_of(ticket) - len(ticket.sequences)
        num_tokens = min(len(own) * size, num_computed)
        is_cheaper = self.cost.is_below(len(own), num_tokens, ticket.prefill_ns_per_token)
        return is_cheaper or not self._compares_costs

    async def put(self, ticket: Ticket) -> Swapped | None:
        """Copy the KV of a group that no step touches any more, all or nothing.

        A block that several sequences share is copied once. The holder keeps its id.

        Returns None if the swap pool has no room, a cached block there does not match the group's
        tokens, or the holder id was used there before.
        """
        began = time.perf_counter()
        block_keys = BlockKeys.of(ticket, self.spec.block_size, num_left_out=1)
        sources = block_keys.blocks([state.block_ids for state in ticket.sequences])
        allocation = await self._allocate(ticket, block_keys, len(sources))
        if allocation is None:
            return None
        pool_id, holder_id, epoch = self.spec.pool_id, ticket.holder_id, allocation.epoch
        targets = allocation.cached(*block_keys.chains)
        if wrong := block_keys.first_mismatch(self._stamps, targets):
            await self._retract(targets[wrong], wrong)
            await self._store.release(pool_id, holder_id, epoch)
            return None
        missing = (key for key in sources if key not in targets)
        new = allocation.block_ids[allocation.num_cached_blocks :]
        copied = dict(zip(missing, new, strict=True))
        copies = self._copy_out, self._stamps, block_keys, sources, copied
        copying_s = await self._copy(*copies)
        await self._store.commit(pool_id, holder_id, epoch, block_keys.full_among(copied))
        epoch = await self._store.detach(pool_id, holder_id, epoch)
        self._metrics.swapped_out_blocks.inc(len(copied))
        self.cost.observe(len(copied), copying_s, time.perf_counter() - began)
        targets |= copied
        tables = (
            SwappedTable(state.index, tuple(targets[key] for key in block_keys.keys_of(number)))
            for number, state in enumerate(ticket.sequences)
        )
        return Swapped(pool_id, holder_id, epoch, tuple(tables))

    async def fetch(self, ticket: Ticket, allocation: Allocation, block_keys: BlockKeys) -> Fetched:
        """Copy back the KV that the worker's pool has not cached, into the new blocks of
        `allocation`, and release the holder in the swap pool.

        `allocation` was made for `block_keys`. KV whose blocks in the swap pool are
        gone, or do not match their stamps, is not copied; the worker computes it again.
        """
        assert ticket.swapped is not None
        swapped, cached = ticket.swapped, allocation.cached(*block_keys.chains)
        holder = swapped.pool_id, swapped.holder_id
        try:
            claim = await self._store.claim(
                *holder, swapped.holder_epoch, self._worker_id, swapped.block_ids
            )
        except (StaleHolder, NotHeld):
            return Fetched(block_keys.computed_blocks(cached))
        swapped_keys = BlockKeys.of(ticket, self.spec.block_size, num_left_out=1)
        sources: dict[Key, int] = {}
        if self._agrees_with_claim(swapped, claim):
            sources = swapped_keys.blocks(_tables(ticket, swapped))
            await self._drop_untrusted(sources, swapped_keys, swapped.holder_id)
        new = allocation.block_ids[allocation.num_cached_blocks :]
        computed, copied = block_keys.computed_with_copies(cached, swapped_keys, sources, new)
        if copied:
            await self._copy(self._copy_back, self._own_stamps, swapped_keys, sources, copied)
            self._metrics.swapped_in_blocks.inc(len(copied))
        await self._store.release(*holder, claim.epoch)
        return Fetched(computed, len(copied), swapped_keys.full_among(copied))

    def close(self) -> None:
        """End the copy thread, after the copy in progress."""
        self._thread.shutdown()

    async def _allocate(
        self, ticket: Ticket, block_keys: BlockKeys, num_blocks: int
    ) -> Allocation | None:
        """None if the swap pool has no room, or the holder id was used there before."""
        pool_id, holder_id = self.spec.pool_id, ticket.holder_id
        hashes, branches = block_keys.chains
        asked = self._worker_id, ticket.order, hashes, num_blocks, branches
        try:
            return await self._store.allocate(pool_id, holder_id, *asked)
        except (OutOfBlocks, MustWait):
            await self._store.withdraw(pool_id, holder_id)
            return None
        except StaleHolder:
            return None

    def _agrees_with_claim(self, swapped: Swapped, claim: Claim) -> bool:
        """Whether the tables agree with the claim.

        Each table must list its blocks in the order in which they were acquired, and the tables
        together must name all unfinished blocks in it. Stamps check the finished blocks.
        """
        places = {block_id: number for number, block_id in enumerate(claim.block_ids)}
        tables = ([places[b] for b in table.block_ids] for table in swapped.tables)
        named, held = (
            [b for b in block_ids if not self._stamps.is_committed(b)]
            for block_ids in (swapped.block_ids, claim.block_ids)
        )
        return named == held and all(table == sorted(table) for table in tables)

    async def _drop_untrusted(
        self, sources: dict[Key, int], block_keys: BlockKeys, owner: str
    ) -> None:
        """Remove from `sources` full blocks whose stamps do not match their tokens, and partly
        filled blocks that `owner` did not write (law 6)."""
        while wrong := block_keys.first_mismatch(self._stamps, sources):
            await self._retract(sources.pop(wrong), wrong)
        for tail in block_keys.tails:
            if tail in sources and not self._stamps.are_written_by([sources[tail]], owner):
                del sources[tail]

    async def _retract(self, block_id: int, prefix_hash: PrefixHash) -> None:
        log.error("kv_corrupt", pool_id=self.spec.pool_id, block_id=block_id)
        self._metrics.kv_corrupt.inc()
        await self._store.retract(self.spec.pool_id, block_id, prefix_hash)

    async def _copy(
        self,
        copy: Copy,
        stamps: Stamps,
        block_keys: BlockKeys,
        sources: Mapping[Key, int],
        targets: Mapping[Key, int],
    ) -> float:
        """Copy KV, and then complete the stamps of the full target blocks: law 6 requires this
        order. Their owner was stamped when the store granted them. Returns the duration in s."""

        def work() -> float:
            began = time.perf_counter()
            self._check_fence()
            copy([(sources[key], target) for key, target in targets.items()])
            self._check_fence()
            for span in block_keys.spans:
                span.stamp(stamps, targets)
            return time.perf_counter() - began

        return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], float]) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _tables(ticket: Ticket, swapped: Swapped) -> list[tuple[int, ...]]:
    """The block tables in the swap pool of the ticket's sequences, in their order."""
    tables = {table.index: table.block_ids for table in swapped.tables}
    return [tables[state.index] for state in ticket.sequences]
