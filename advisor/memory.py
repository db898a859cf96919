"""The KV memory of a simulation: blocks of a pool, allocated by the block store that workers
use."""

import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from advisor.workload import RecordedRequest
from blockstore.errors import MustWait, OutOfBlocks
from blockstore.records import Growth, PoolSpec, PrefixHash
from blockstore.store import BlockStore
from services.common.pool.allotment import (
    LOOK_AHEAD,
    WATERMARK,
    blocks_at_admission,
    blocks_for_decode,
)

T = TypeVar("T")

_WORKER = "simulated"


class DoesNotFit(Exception):
    """A request can never get its slots, even in an empty memory; the text has the numbers."""


@dataclass(slots=True, order=True)
class SimulatedRequest:
    """A simulated request. `num_tokens`: its prompt and the tokens generated so far;
    `num_computed`: how many of them have KV in the memory."""

    number: int
    asked: RecordedRequest = field(compare=False)
    num_tokens: int = field(compare=False)
    num_computed: int = field(default=0, compare=False)
    num_starts: int = field(default=0, compare=False)

    @property
    def is_done(self) -> bool:
        return self.num_tokens == self.asked.num_tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots of a memory at one moment. `wasted`: reserved slots without KV, one number for each of
    the memory's `waste_kinds`; num_kv + sum(wasted) == num_reserved."""

    num_reserved: int
    num_kv: int
    wasted: tuple[int, int]


class Memory(Protocol):
    """Reserves slots for the KV of simulated requests."""

    @property
    def waste_kinds(self) -> tuple[str, str]:
        """The two reasons why reserved slots hold no KV, for reports."""

    async def admit(self, request: SimulatedRequest) -> bool:
        """Reserve slots for all tokens of a request and one more. False: there are too few free
        slots now; DoesNotFit: there never are enough."""

    def has_slots(self, request: SimulatedRequest) -> bool:
        """Whether the request has slots for the KV of all its tokens."""

    async def commit(self, request: SimulatedRequest) -> None:
        """Record that the KV of all tokens of a request was computed."""

    async def release(self, request: SimulatedRequest) -> None:
        """Free the slots of a request that has ended."""

    async def grow(self, running: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        """Reserve slots for the next tokens. Returns the preempted requests, whose slots are
        free."""

    async def usage(self, running: Sequence[SimulatedRequest]) -> Usage: ...


@dataclass(slots=True)
class _Allocated:
    """A request's holder in the store. Its epoch is always 1."""

    holder_id: str
    block_ids: list[int]
    num_committed: int


class PagedMemory:
    """A pool of `store`. It asks for blocks as a worker does: at a request's admission, and while
    the request decodes. Full blocks are committed, and found by later requests with that prefix.

    `max_model_len`: the longest that a sequence may become as far as its worker knows; None: the
    worker knows each sequence's length, as if its client had sent the exact `max_tokens`.
    """

    waste_kinds = ("tail", "look-ahead")

    def __init__(self, store: BlockStore, spec: PoolSpec, max_model_len: int | None = None) -> None:
        self._store = store
        self._spec = spec
        self._max_model_len = max_model_len
        self._held: dict[int, _Allocated] = {}
        self._prefixes: dict[str, int] = {}
        self._refused: tuple[int, int] | None = None  # (request refused last, releases until then)
        self.num_calls = Counter[str]()
        self.num_blocks = 0
        """Sum of the lengths of the block tables of all requests that have ended."""
        self.store_s = 0.0
        """Total time of the store calls that a block size affects."""

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
        """Register a new pool of `num_slots` token slots, and a worker on it."""
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

    async def admit(self, request: SimulatedRequest) -> bool:
        size, num_slots = self._spec.block_size, self._spec.num_blocks * self._spec.block_size
        if request.asked.num_tokens > num_slots:
            raise DoesNotFit(
                f"a request of {request.asked.num_tokens} tokens never fits a pool of "
                f"{self._spec.num_blocks} blocks of {size}"
            )
        if self._refused == (request.number, self.num_calls["release"]):
            return False  # nothing was released since the refusal
        num_full = request.num_tokens // size
        hashes = [self._hash(request.asked, request.number, index) for index in range(num_full)]
        holder_id = f"{request.number}.{request.num_starts}"
        try:
            allocation = await self._call(
                "allocate",
                self._store.allocate(
                    *(self._spec.pool_id, holder_id, _WORKER, request.number + 1, hashes),
                    blocks_at_admission(request.num_tokens, size),
                ),
            )
        except (OutOfBlocks, MustWait):
            self._refused = request.number, self.num_calls["release"]
            return False
        self._held[request.number] = _Allocated(
            holder_id, list(allocation.block_ids), allocation.num_cached_blocks
        )
        return True

    def has_slots(self, request: SimulatedRequest) -> bool:
        holding = self._held[request.number]
        return request.num_tokens <= len(holding.block_ids) * self._spec.block_size

    async def commit(self, request: SimulatedRequest) -> None:
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
        await self._call("commit", self._store.commit(pool_id, holding.holder_id, 1, blocks))

    async def release(self, request: SimulatedRequest) -> None:
        self.num_blocks += len(self._held[request.number].block_ids)
        await self._release(request.number, comes_back=False)

    async def grow(self, running: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        """Ask for the missing blocks again after each preemption, as a worker does."""
        staying, victims = list(running), list[SimulatedRequest]()
        while growths := [growth for request in staying if (growth := self._growth_of(request))]:
            demanded = await self._extend(growths, staying)
            for victim in demanded:
                await self._release(victim.number, comes_back=True)
                staying.remove(victim)
            victims += demanded
            if not demanded:
                break
        return victims

    async def _extend(
        self, growths: Sequence[Growth], running: Sequence[SimulatedRequest]
    ) -> Sequence[SimulatedRequest]:
        """Get blocks for as many `growths` as the store can serve. Returns the requests that the
        store demands to be preempted."""
        pool_id = self._spec.pool_id
        extension = await self._call("extend", self._store.extend(pool_id, _WORKER, growths))
        by_holder = {self._held[request.number].holder_id: request for request in running}
        for grown in extension.grown:
            self._held[by_holder[grown.holder_id].number].block_ids += grown.block_ids
        return [by_holder[holder_id] for holder_id in extension.demands]

    async def usage(self, running: Sequence[SimulatedRequest]) -> Usage:
        """Count shared blocks once. A held block is full of KV, except the last blocks of each
        sequence: those belong to one sequence only.

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

    def _growth_of(self, request: SimulatedRequest) -> Growth | None:
        holding, size = self._held[request.number], self._spec.block_size
        longest = request.asked.num_tokens
        if self._max_model_len is not None:
            room = self._spec.num_blocks * size  # the gateway refuses requests that need more
            longest = max(longest, min(self._max_model_len, room))
        total = blocks_for_decode(request.num_tokens, LOOK_AHEAD, longest, size)
        have = len(holding.block_ids)
        return Growth(holding.holder_id, 1, have, total) if total > have else None

    async def _release(self, number: int, comes_back: bool) -> None:
        holder_id = self._held.pop(number).holder_id
        pool_id = self._spec.pool_id
        await self._call("release", self._store.release(pool_id, holder_id, 1, comes_back))

    async def _call(self, name: str, answer: Awaitable[T]) -> T:
        self.num_calls[name] += 1
        began = time.perf_counter()
        try:
            return await answer
        finally:
            self.store_s += time.perf_counter() - began

    def _hash(self, asked: RecordedRequest, number: int, index: int) -> PrefixHash:
        """A stand-in for the prefix hash of a request's block: two are equal exactly if all tokens
        up to the ends of their blocks are."""
        is_shared = (index + 1) * self._spec.block_size <= asked.num_shared_tokens
        owner = 2 * number
        if is_shared:
            owner = 2 * self._prefixes.setdefault(asked.prefix, len(self._prefixes)) + 1
        return (owner << 64 | index).to_bytes(16, "big")
