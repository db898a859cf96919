"""Two pools in memory, a request in one of them, and a transport whose reads land on demand."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar

from blockstore.hashing import prefix_hashes, root_hash
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from services.mover.pull import Pull, Target
from services.mover.source import Copies, Source
from services.mover.transport import Area, State, Transfer
from services.pool.stamps import Stamps
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence

SIZE, NUM_BLOCKS, BLOCK_BYTES = 4, 16, 8
ROOT = root_hash("same", b"secret", "")
SAMPLING = SamplingParams(0.0, 0, 1.0, 0.0, 1, 100)


@dataclass
class Pool:
    """A pool with one worker, whose id is `worker`."""

    spec: PoolSpec
    store: MemoryStore
    stamps: Stamps
    kv: mmap.mmap

    @classmethod
    async def make(cls, store: MemoryStore, pool_id: str) -> "Pool":
        spec = PoolSpec(pool_id, "m", "same", NUM_BLOCKS, SIZE, BLOCK_BYTES)
        pool = cls(
            spec, store, Stamps(None, NUM_BLOCKS, SIZE), mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)
        )
        await store.register_pool(spec)
        await store.register_worker(spec, "worker", mark_owned=pool.mark_owned)
        return pool

    def mark_owned(self, holder_id: str, block_ids: Sequence[int]) -> None:
        self.stamps.mark_owned(block_ids, holder_id)

    def block(self, block_id: int) -> bytes:
        return self.kv[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]

    def write(self, block_id: int, tokens: Sequence[int]) -> None:
        """Write KV that identifies its tokens."""
        data = bytes(token % 251 + 1 for token in tokens).ljust(BLOCK_BYTES, b"\0")
        self.kv[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES] = data

    async def compute(self, holder_id: str, tokens: Sequence[int], order: int = 1) -> list[int]:
        """Allocate a prompt, compute all but its last token, commit its full blocks."""
        hashes = prefix_hashes(ROOT, tuple(tokens), SIZE)
        number = len(tokens) // SIZE + 1
        given = await self.store.allocate(
            self.spec.pool_id, holder_id, "worker", order, hashes, number
        )
        blocks, computed = list(given.block_ids), tokens[:-1]
        for index in range(given.num_cached_blocks, -(-len(computed) // SIZE)):
            self.write(blocks[index], computed[index * SIZE : (index + 1) * SIZE])
        parent, complete = ROOT, []
        for index in range(len(computed) // SIZE):
            own = hashes[index]
            self.stamps.complete(
                blocks[index], own, parent, tokens[index * SIZE : (index + 1) * SIZE]
            )
            complete.append((blocks[index], own))
            parent = own
        await self.store.commit(self.spec.pool_id, holder_id, given.epoch, complete)
        return blocks


class Reading:
    """A read. It lands at `land`, or at the first poll if the transport lands by itself."""

    def __init__(self, do: Callable[[], None], lands: bool) -> None:
        self.state = State.RUNNING
        self.released = False
        self._do = do
        self._lands = lands

    def land(self, state: State = State.DONE) -> None:
        self._do()
        self.state = state

    def poll(self) -> State:
        if self._lands and self.state is State.RUNNING:
            self.land()
        return self.state

    def release(self) -> None:
        assert self.state is not State.RUNNING, "NIXL would go on landing"
        self.released = True


@dataclass
class LateTransport:
    """`lands`: whether reads land by themselves. `before_read`: called before each read with its
    number, from 0 on."""

    source: Pool
    target: Pool
    lands: bool = True
    before_read: Callable[[int], None] = lambda number: None
    reads: list[Reading] = field(default_factory=list)
    name: ClassVar[str] = "late"

    def read(
        self, source: Any, area: Area, items: Sequence[int], target: Any, places: Sequence[int]
    ) -> Transfer:
        self.before_read(len(self.reads))
        pairs = list(zip(items, places, strict=True))

        def do() -> None:
            for item, place in pairs:
                if area is Area.STAMPS:
                    _copy_record(self.source.stamps, item, target, place)
                else:
                    data = self.source.block(item)
                    self.target.kv[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES] = data

        reading = Reading(do, self.lands)
        self.reads.append(reading)
        return reading

    def share(self, blocks: Any, stamps: Any) -> bytes:
        return b""

    def allocate(self, num_parts: int, item_bytes: int, num_items: int) -> Any: ...

    def prepare(self, region: Any) -> Any:
        return region

    def forget(self, prepared: Any) -> None: ...

    def connect(self, memory: bytes) -> Any: ...

    def disconnect(self, source: Any) -> None: ...

    def close(self) -> None: ...


def _copy_record(source: Stamps, item: int, target: Stamps, place: int) -> None:
    record = source.record(item)
    target.memory[place * len(record) : (place + 1) * len(record)] = record


class ProcessEnded(Exception):
    """Stands for the end of the process."""


@dataclass
class World:
    """Pool `a`, from which the mover of pool `b` pulls."""

    store: MemoryStore
    a: Pool
    b: Pool
    transport: LateTransport
    source: Source
    target: Target
    ended: list[str]
    is_fenced: bool = False
    clock: Callable[[], float] = monotonic

    @classmethod
    async def make(cls, **options: Any) -> "World":
        store = MemoryStore()
        a, b = await Pool.make(store, "a"), await Pool.make(store, "b")
        await store.register_worker(a.spec, "remote", lease_ms=10_000)
        await store.register_worker(b.spec, "mover", mark_owned=b.mark_owned)
        source = Source(store, a.spec, "remote", None, lease_s=10.0)
        before, after = (Stamps(None, NUM_BLOCKS, SIZE) for _ in range(2))
        source.stampings.put_nowait((Copies(before, before), Copies(after, after)))
        ended: list[str] = []
        transport = LateTransport(a, b, **options)

        def end(reason: str) -> None:
            ended.append(reason)
            raise ProcessEnded(reason)

        target = Target(store, b.spec, "mover", b.stamps, None, lambda: not world.is_fenced, end)
        world = cls(store, a, b, transport, source, target, ended)
        return world

    async def detached(self, tokens: Sequence[int], holder_id: str = "h") -> Ticket:
        """A request at rest in pool a: its prompt is all but the last of `tokens`, which it has
        generated."""
        blocks = await self.a.compute(holder_id, tokens)
        epoch = await self.store.detach("a", holder_id, 1)
        state = TicketSequence(0, (tokens[-1],), tuple(blocks), len(tokens) - 1)
        return self.ticket(tokens[:-1], (state,), holder_id, epoch)

    def ticket(
        self,
        prompt: Sequence[int],
        sequences: tuple[TicketSequence, ...] = (TicketSequence(0),),
        holder_id: str = "h",
        epoch: int = 0,
    ) -> Ticket:
        return Ticket(
            "r",
            1,
            7,
            holder_id,
            epoch,
            pool_id="a",
            root_hash=ROOT,
            prompt_token_ids=tuple(prompt),
            sampling=SAMPLING,
            sequences=sequences,
        )

    def pull(self, ticket: Ticket, timeout_s: float = 5.0, landing_s: float = 5.0) -> Pull:
        limits = timeout_s, landing_s
        return Pull(self.transport, self.source, self.target, ticket, *limits, self.clock)

    async def num_held(self, pool_id: str) -> int:
        audit = await self.store.audit(pool_id)
        assert not audit.violations
        return (await self.store.stats(pool_id)).num_held
