"""The colder pool beside a worker's own: KV is swapped out to it, and comes back.

A colder pool is a pool like any other, with a ledger, stamps and locks of its own. What is swapped
out there is a holder at rest, its full blocks stamped and in the colder pool's own prefix index: a
prefix that is there already is shared, not copied again.

    put     allocate there -> copy -> stamp, commit -> detach: at rest until somebody claims it
    fetch   claim it -> compare stamps -> copy what the own pool has not cached -> release it
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from blockstore.errors import MustWait, NotHeld, OutOfBlocks, StaleHolder
from blockstore.hashing import prefix_hashes
from blockstore.store import Allocation, BlockStore, PoolSpec, PrefixHash
from services.common.logging import get_logger
from services.common.metrics import WorkerMetrics
from services.common.pool.stamps import Stamps, StampState, owner_token
from services.common.ticket import Swapped, Ticket
from services.worker.swap_cost import SwapCost

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
    """`num_tokens`: leading ones whose KV the worker's own blocks have now, cached or copied.
    `num_blocks`: those that have been written. `completed`: full ones among them, to commit."""

    num_tokens: int
    num_blocks: int = 0
    completed: tuple[tuple[int, PrefixHash], ...] = ()


class ColderPool:
    """Copies run one at a time in a thread of their own, beside the steps: they touch only blocks
    that no step touches. `copy_out` copies to the colder arena, `copy_back` from it. Where the
    costs are not compared, swapping is always worth it."""

    def __init__(
        self,
        store: BlockStore,
        own: StampedPool,
        colder: StampedPool,
        copy_out: Copy,
        copy_back: Copy,
        metrics: WorkerMetrics,
        compares_costs: bool = True,
    ) -> None:
        self.spec = colder.spec
        self.cost = SwapCost()
        self._store = store
        self._worker_id = colder.worker_id
        self._own_stamps = own.stamps
        self._stamps = colder.stamps
        self._copy_out = copy_out
        self._copy_back = copy_back
        self._metrics = metrics
        self._compares_costs = compares_costs
        self._thread = ThreadPoolExecutor(1, "copier")

    def holds(self, swapped: Swapped) -> bool:
        """Whether the blocks that it names can be this pool's."""
        num_slots = len(swapped.block_ids) * self.spec.block_size
        return (
            swapped.pool_id == self.spec.pool_id
            and num_slots >= swapped.num_computed_tokens
            and max(swapped.block_ids) < self.spec.num_blocks
        )

    def is_worthwhile(self, num_blocks: int, num_tokens: int, prefill_ns_per_token: int) -> bool:
        """Whether copying so many blocks out and back beats computing so many tokens again."""
        cost = self.cost.is_below(num_blocks, num_tokens, prefill_ns_per_token)
        return cost or not self._compares_costs

    async def put(self, ticket: Ticket) -> Swapped | None:
        """Copy the KV of a sequence that no step touches any more, all or nothing. None: the colder
        pool has no room for it. The holder there has the same id as the one in the own pool."""
        began = time.perf_counter()
        sequence = ticket.sequences[0]
        num_tokens, size = sequence.num_computed_tokens, self.spec.block_size
        tokens = (*ticket.prompt_token_ids, *sequence.token_ids)[:num_tokens]
        hashes = prefix_hashes(ticket.root_hash, tokens, size)
        allocation = await self._allocate(ticket, hashes, -(-num_tokens // size))
        if allocation is None:
            return None
        first, block_ids = allocation.num_cached_blocks, allocation.block_ids
        if await self._num_matching(block_ids[:first], ticket.root_hash, hashes, tokens) < first:
            await self._store.release(self.spec.pool_id, ticket.holder_id, allocation.epoch)
            return None
        stamping = _Stamping(self._stamps, ticket, hashes, tokens, size)
        pairs = list(zip(sequence.block_ids, block_ids, strict=False))[first:]
        copying_s = await self._copy(self._copy_out, stamping, pairs, first)
        holder_id, epoch = ticket.holder_id, allocation.epoch
        completed = list(zip(block_ids, hashes, strict=False))[first:]
        await self._store.commit(self.spec.pool_id, holder_id, epoch, completed)
        epoch = await self._store.detach(self.spec.pool_id, holder_id, epoch)
        self._metrics.swapped_out_blocks.inc(len(pairs))
        self.cost.observe(len(pairs), copying_s, time.perf_counter() - began)
        return Swapped(self.spec.pool_id, holder_id, epoch, block_ids, num_tokens)

    async def fetch(
        self, ticket: Ticket, allocation: Allocation, hashes: Sequence[PrefixHash]
    ) -> Fetched:
        """Copy back what the own pool's cache has not, into new blocks of `allocation`. It is less
        than was swapped out, down to nothing, where the colder blocks are gone or say something
        else: the rest is computed."""
        assert ticket.swapped is not None
        swapped, size = ticket.swapped, self.spec.block_size
        first = allocation.num_cached_blocks
        cached = Fetched(first * size)
        try:
            claim = await self._store.claim(
                swapped.pool_id,
                swapped.holder_id,
                swapped.holder_epoch,
                self._worker_id,
                swapped.block_ids,
            )
        except (StaleHolder, NotHeld):
            return cached
        if claim.block_ids != swapped.block_ids:  # in another order, say
            await self._store.release(swapped.pool_id, swapped.holder_id, claim.epoch)
            return cached
        tokens = (*ticket.prompt_token_ids, *ticket.sequences[0].token_ids)
        num_tokens = await self._num_sound(swapped, ticket.root_hash, hashes, tokens)
        last = -(-num_tokens // size)
        if last > first:
            full = hashes[: num_tokens // size]
            stamping = _Stamping(self._own_stamps, ticket, full, tokens, size)
            pairs = list(zip(swapped.block_ids, allocation.block_ids, strict=False))[first:last]
            await self._copy(self._copy_back, stamping, pairs, first)
            self._metrics.swapped_in_blocks.inc(len(pairs))
            completed = tuple(zip(allocation.block_ids, full, strict=False))[first:]
            cached = Fetched(num_tokens, len(pairs), completed)
        await self._store.release(swapped.pool_id, swapped.holder_id, claim.epoch)
        return cached

    async def release(self, swapped: Swapped) -> None:
        """Let go of what is at rest there. StaleHolder: somebody has claimed it."""
        await self._store.release(swapped.pool_id, swapped.holder_id, swapped.holder_epoch)

    def close(self) -> None:
        """Copy nothing any more."""
        self._thread.shutdown()

    async def _allocate(
        self, ticket: Ticket, hashes: Sequence[PrefixHash], num_blocks: int
    ) -> Allocation | None:
        pool_id, holder_id = self.spec.pool_id, ticket.holder_id
        try:
            return await self._store.allocate(
                pool_id, holder_id, self._worker_id, ticket.order, hashes, num_blocks
            )
        except (OutOfBlocks, MustWait):
            await self._store.withdraw(pool_id, holder_id)
            return None
        except StaleHolder:  # something of this name was there before
            return None

    async def _num_sound(
        self,
        swapped: Swapped,
        root_hash: PrefixHash,
        hashes: Sequence[PrefixHash],
        tokens: Sequence[int],
    ) -> int:
        """Leading tokens whose blocks say what they should: full ones by parent and tokens, the
        last one, which is not full, by its owner (law 6)."""
        num_tokens, size = swapped.num_computed_tokens, self.spec.block_size
        num_full = num_tokens // size
        num_sound = await self._num_matching(
            swapped.block_ids[:num_full], root_hash, hashes, tokens
        )
        if num_sound < num_full or num_tokens % size == 0:
            return num_sound * size
        tail = self._stamps.read(swapped.block_ids[num_full])
        is_ours = (tail.state, tail.owner) == (StampState.PRIVATE, owner_token(swapped.holder_id))
        return num_tokens if is_ours else num_full * size

    async def _num_matching(
        self,
        block_ids: Sequence[int],
        root_hash: PrefixHash,
        hashes: Sequence[PrefixHash],
        tokens: Sequence[int],
    ) -> int:
        """How many of these full blocks of the colder pool say what their hashes promise, up to the
        first that does not, which leaves its index."""
        num_blocks = len(block_ids)
        wrong = self._stamps.first_mismatch(
            block_ids, root_hash, hashes[:num_blocks], tokens[: num_blocks * self.spec.block_size]
        )
        if wrong is None:
            return num_blocks
        log.error("kv_corrupt", pool_id=self.spec.pool_id, block_id=block_ids[wrong])
        self._metrics.kv_corrupt.inc()
        await self._store.retract(self.spec.pool_id, block_ids[wrong], hashes[wrong])
        return wrong

    async def _copy(
        self, copy: Copy, stamping: "_Stamping", pairs: Sequence[tuple[int, int]], first: int
    ) -> float:
        """In the order of law 6: owner, KV, stamp. How many seconds it took."""

        def work() -> float:
            began = time.perf_counter()
            stamping.own([target for _, target in pairs])
            copy(pairs)
            stamping.complete([target for _, target in pairs], first)
            return time.perf_counter() - began

        return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], float]) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass(frozen=True, slots=True)
class _Stamping:
    """Says what copied blocks hold: those of a sequence from number `first` on, `hashes` of full
    ones."""

    stamps: Stamps
    ticket: Ticket
    hashes: Sequence[PrefixHash]
    tokens: Sequence[int]
    block_size: int

    def own(self, block_ids: Sequence[int]) -> None:
        self.stamps.own(block_ids, self.ticket.holder_id)

    def complete(self, block_ids: Sequence[int], first: int) -> None:
        size = self.block_size
        for number, block_id in enumerate(block_ids, first):
            if number >= len(self.hashes):
                return
            parent = self.hashes[number - 1] if number else self.ticket.root_hash
            token_ids = self.tokens[number * size : (number + 1) * size]
            self.stamps.complete(block_id, self.hashes[number], parent, token_ids)
