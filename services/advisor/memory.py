"""Where simulated sequences get their slots: blocks of a pool, by the block store that workers use,
or one piece in a row for each, as servers did it before."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from blockstore.errors import MustWait, OutOfBlocks
from blockstore.records import Growth, PoolSpec, PrefixHash
from blockstore.store import BlockStore
from services.advisor.workload import Asked
from services.common.pool.allotment import LOOK_AHEAD, WATERMARK, blocks_to_begin, blocks_to_go_on

T = TypeVar("T")

_WORKER = "simulated"


class DoesNotFit(Exception):
    """A request that never gets its slots, whoever leaves; the text has the numbers."""


@dataclass(slots=True, order=True)
class Simulated:
    """One request under way. `num_computed` of its tokens have their KV in the memory."""

    number: int
    asked: Asked = field(compare=False)
    num_tokens: int = field(compare=False)
    num_computed: int = field(default=0, compare=False)
    num_starts: int = field(default=0, compare=False)

    @property
    def is_done(self) -> bool:
        return self.num_tokens == self.asked.num_tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots of a memory at one moment. What holds no KV is `wasted`, by the memory's `wastes`;
    num_kv + sum(wasted) == num_reserved."""

    num_reserved: int
    num_kv: int
    wasted: tuple[int, int]


class Memory(Protocol):
    @property
    def wastes(self) -> tuple[str, str]:
        """Why reserved slots hold no KV."""

    async def admit(self, request: Simulated) -> bool:
        """Slots for all its tokens and one more; False: not now. DoesNotFit."""

    def has_slots(self, request: Simulated) -> bool:
        """For the KV of all its tokens."""

    async def keep(self, request: Simulated) -> None:
        """The KV of all its tokens was computed."""

    async def release(self, request: Simulated) -> None:
        """It has ended."""

    async def grow(self, running: Sequence[Simulated]) -> Sequence[Simulated]:
        """Slots for the next tokens; those that had to give way, and have none any more."""

    async def usage(self, running: Sequence[Simulated]) -> Usage: ...


@dataclass(slots=True)
class _Holding:
    """A sequence's holder in the store, at epoch 1 for all its life."""

    holder_id: str
    block_ids: list[int]
    num_committed: int


class PagedMemory:
    """A pool of `store`, asked for blocks as a worker asks: at a sequence's admission, and while it
    decodes; full blocks are committed, shared and found again.

    `max_model_len`: tokens that a sequence may grow to, for all that its worker knows; None: it
    knows where each ends (a client that sets max_tokens and gets as many).
    """

    wastes = ("tail", "look-ahead")

    def __init__(self, store: BlockStore, spec: PoolSpec, max_model_len: int | None = None) -> None:
        self._store = store
        self._spec = spec
        self._max_model_len = max_model_len
        self._held: dict[int, _Holding] = {}
        self._prefixes: dict[str, int] = {}
        self._refused: tuple[int, int] | None = None  # (whom, after how many releases)
        self.num_calls = Counter[str]()
        self.num_blocks = 0
        """In the tables of all that have ended."""
        self.store_s = 0.0
        """That the store took to answer what depends on the block size."""

    @classmethod
    async def on(
        cls,
        store: BlockStore,
        pool_id: str,
        num_slots: int,
        block_size: int,
        max_model_len: int | None = None,
        watermark: float = WATERMARK,
    ) -> Self:
        """A new pool of so many slots, and a worker on it."""
        num_blocks = num_slots // block_size
        spec = PoolSpec(
            pool_id,
            model="simulated",
            fingerprint="simulated",
            num_blocks=num_blocks,
            block_size=block_size,
            block_bytes=1,
            watermark_blocks=int(watermark * num_blocks),
        )
        await store.register_pool(spec)
        await store.register_worker(spec, _WORKER)
        return cls(store, spec, max_model_len)

    async def admit(self, request: Simulated) -> bool:
        size, num_slots = self._spec.block_size, self._spec.num_blocks * self._spec.block_size
        if request.asked.num_tokens > num_slots:
            raise DoesNotFit(
                f"a request of {request.asked.num_tokens} tokens never fits a pool of "
                f"{self._spec.num_blocks} blocks of {size}"
            )
        if self._refused == (request.number, self.num_calls["release"]):
            return False  # nothing was freed since then
        num_full = request.num_tokens // size
        hashes = [self._hash(request.asked, request.number, index) for index in range(num_full)]
        holder_id = f"{request.number}.{request.num_starts}"
        try:
            allocation = await self._ask(
                "allocate",
                self._store.allocate(
                    *(self._spec.pool_id, holder_id, _WORKER, request.number + 1, hashes),
                    blocks_to_begin(request.num_tokens, size),
                ),
            )
        except (OutOfBlocks, MustWait):
            self._refused = request.number, self.num_calls["release"]
            return False
        self._held[request.number] = _Holding(
            holder_id, list(allocation.block_ids), allocation.num_cached_blocks
        )
        return True

    def has_slots(self, request: Simulated) -> bool:
        holding = self._held[request.number]
        return request.num_tokens <= len(holding.block_ids) * self._spec.block_size

    async def keep(self, request: Simulated) -> None:
        holding = self._held[request.number]
        num_full = request.num_computed // self._spec.block_size
        if num_full <= holding.num_committed:
            return
        blocks = [
            (holding.block_ids[index], self._hash(request.asked, request.number, index))
            for index in range(holding.num_committed, num_full)
        ]
        holding.num_committed = num_full
        pool_id = self._spec.pool_id
        await self._ask("commit", self._store.commit(pool_id, holding.holder_id, 1, blocks))

    async def release(self, request: Simulated) -> None:
        self.num_blocks += len(self._held[request.number].block_ids)
        await self._let_go(request.number, comes_back=False)

    async def grow(self, running: Sequence[Simulated]) -> Sequence[Simulated]:
        """Whoever is short asks again as soon as somebody has given way, as a worker does."""
        staying, victims = list(running), list[Simulated]()
        while growths := [growth for request in staying if (growth := self._growth(request))]:
            demanded = await self._extend(growths, staying)
            for victim in demanded:
                await self._let_go(victim.number, comes_back=True)
                staying.remove(victim)
            victims += demanded
            if not demanded:
                break
        return victims

    async def _extend(
        self, growths: Sequence[Growth], running: Sequence[Simulated]
    ) -> Sequence[Simulated]:
        """Who must give way for others to grow."""
        pool_id = self._spec.pool_id
        extension = await self._ask("extend", self._store.extend(pool_id, _WORKER, growths))
        by_holder = {self._held[request.number].holder_id: request for request in running}
        for grown in extension.grown:
            self._held[by_holder[grown.holder_id].number].block_ids += grown.block_ids
        return [by_holder[holder_id] for holder_id in extension.demands]

    async def usage(self, running: Sequence[Simulated]) -> Usage:
        """KV counts once however many share it: of the held blocks all are full of it but each
        sequence's last ones, which are its own.

            block table   |=======|=======|====...|.......|
                            full    full    tail    look-ahead
        """
        size = self._spec.block_size
        num_held = (await self._store.stats(self._spec.pool_id)).num_held
        num_own = num_in_tails = num_tails = 0
        for request in running:
            num_full, num_in_tail = divmod(request.num_computed, size)
            num_own += len(self._held[request.number].block_ids) - num_full
            num_in_tails += num_in_tail
            num_tails += num_in_tail > 0
        tail = num_tails * size - num_in_tails
        ahead = (num_own - num_tails) * size
        return Usage(num_held * size, (num_held - num_own) * size + num_in_tails, (tail, ahead))

    def _growth(self, request: Simulated) -> Growth | None:
        holding, size = self._held[request.number], self._spec.block_size
        longest = request.asked.num_tokens
        if self._max_model_len is not None:
            room = self._spec.num_blocks * size  # more is never asked for: the gateway refuses it
            longest = max(longest, min(self._max_model_len, room))
        total = blocks_to_go_on(request.num_tokens, LOOK_AHEAD, longest, size)
        have = len(holding.block_ids)
        return Growth(holding.holder_id, 1, have, total) if total > have else None

    async def _let_go(self, number: int, comes_back: bool) -> None:
        holder_id = self._held.pop(number).holder_id
        pool_id = self._spec.pool_id
        await self._ask("release", self._store.release(pool_id, holder_id, 1, comes_back))

    async def _ask(self, name: str, answer: Awaitable[T]) -> T:
        self.num_calls[name] += 1
        began = time.perf_counter()
        try:
            return await answer
        finally:
            self.store_s += time.perf_counter() - began

    def _hash(self, asked: Asked, number: int, index: int) -> PrefixHash:
        """Of a sequence's block: equal for those, and only those, whose tokens up to its end are
        the same."""
        is_shared = (index + 1) * self._spec.block_size <= asked.num_shared_tokens
        owner = 2 * number
        if is_shared:
            owner = 2 * self._prefixes.setdefault(asked.prefix, len(self._prefixes)) + 1
        return (owner << 64 | index).to_bytes(16, "big")


class ContiguousMemory:
    """`reserve(asked)` slots in a row for each, from its admission to its end. Only their sum
    counts: gaps between the pieces, which there would be too, are left out."""

    wastes = ("for later", "never used")

    def __init__(self, num_slots: int, reserve: Callable[[Asked], int]) -> None:
        self._num_slots = num_slots
        self._reserve = reserve
        self._num_reserved = 0

    async def admit(self, request: Simulated) -> bool:
        wanted = self._reserve(request.asked)
        if not request.asked.num_tokens - 1 <= wanted <= self._num_slots:
            raise DoesNotFit(
                f"a request of {request.asked.num_tokens} tokens, for which {wanted} slots are "
                f"reserved, never fits {self._num_slots}"
            )
        if self._num_reserved + wanted > self._num_slots:
            return False
        self._num_reserved += wanted
        return True

    def has_slots(self, _request: Simulated) -> bool:
        return True

    async def keep(self, _request: Simulated) -> None:
        """Nothing is shared."""

    async def release(self, request: Simulated) -> None:
        self._num_reserved -= self._reserve(request.asked)

    async def grow(self, _running: Sequence[Simulated]) -> Sequence[Simulated]:
        return ()

    async def usage(self, running: Sequence[Simulated]) -> Usage:
        """The last token drawn is never computed."""
        num_kv = sum(request.num_computed for request in running)
        later = sum(request.asked.num_tokens - 1 for request in running) - num_kv
        return Usage(self._num_reserved, num_kv, (later, self._num_reserved - num_kv - later))
