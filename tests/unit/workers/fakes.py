"""A model whose next token depends on every token before it, read through the block table: a wrong
table, a lost or overwritten block, or a missing slot changes its tokens or fails."""

import random
import threading
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec, PrefixHash
from services.engine.batch import Draw, Fault, Row, RowOutput, RowResult, Wait
from services.pool.stamps import Stamps, StampState, record_bytes
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.messages import AwaitsBlocks, Began, DrainNotice, Step, WorkerEvent
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence
from tests.late_device import CompleteFlight

VOCAB = 50_000
NUM_LIKELY = 60
PROMPT = tuple(range(100, 110))


GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=8)
SAMPLED = replace(GREEDY, temperature=1.0)
ALONE = Draw(GREEDY, 0)


def next_token(tokens: Sequence[int], draw: Draw = ALONE) -> int:
    """The greedy token is the same for all sequences of a group; other draws differ."""
    sampled = draw.sampling.temperature > 0
    key = (draw.sampling.seed, draw.sequence_index) if sampled else ()
    return xxhash.xxh32_intdigest(repr((*key, list(tokens))).encode()) % VOCAB


def likeliest_tokens(tokens: Sequence[int], number: int) -> Logprobs:
    """The likeliest tokens after these: of the first NUM_LIKELY token ids; all others are
    impossible."""
    chance = random.Random(repr(list(tokens)))
    logprobs = [float(np.float32(-chance.expovariate(0.5))) for _ in range(NUM_LIKELY)]
    ids = sorted(range(NUM_LIKELY), key=lambda token_id: -logprobs[token_id])[:number]
    return Logprobs(0.0, 1, tuple(ids), tuple(logprobs[token_id] for token_id in ids))


def expected(prompt: Sequence[int], num_tokens: int, draw: Draw = ALONE) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, draw))
    return tokens[len(prompt) :]


class CheckedStamps(Stamps):
    """Stamps that `check` the KV of each block when it is stamped as finished (law 2)."""

    check: Callable[[int, Sequence[int]], None] | None = None

    def complete(
        self, block_id: int, prefix_hash: PrefixHash, parent: PrefixHash, token_ids: Sequence[int]
    ) -> None:
        if self.check is not None:
            self.check(block_id, token_ids)
        super().complete(block_id, prefix_hash, parent, token_ids)


@dataclass
class Arena:
    """slot -> (position, token), in the place of a pool's KV. A writer must own the block by its
    stamp."""

    block_size: int
    stamps: CheckedStamps
    slots: MutableMapping[int, tuple[int, int]] = field(default_factory=dict)
    num_computed: int = 0
    num_copied: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    copying: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.copying.set()
        self.stamps.check = self.check_finished

    def check_finished(self, block_id: int, token_ids: Sequence[int]) -> None:
        """The KV of all these tokens, which fill a block, is present."""
        slots = range(block_id * self.block_size, (block_id + 1) * self.block_size)
        found = [self.slots.get(slot, (-1, -1)) for slot in slots]
        assert [token for _, token in found] == list(token_ids), "stamped before its KV is there"

    def copy_within(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All sources are read first; targets must be owned, as for any write."""
        size, found = self.block_size, dict(self.slots)
        assert len({target for _, target in pairs}) == len(pairs)
        for source, target in pairs:
            assert self.stamps.read(target).state is StampState.PRIVATE
            self.wipe(target)
            for offset in range(size):
                if (slot := source * size + offset) in found:
                    self.slots[target * size + offset] = found[slot]
        self.num_copied += len(pairs)

    def copy_from(self, source: "Arena", pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, as (source, target); the targets must be owned by their stamps.
        Waits for `copying`."""
        assert self.copying.wait(30)
        size = self.block_size
        for block_id, target in pairs:
            assert self.stamps.read(target).state is StampState.PRIVATE
            self.wipe(target)
            for offset in range(size):
                if (slot := block_id * size + offset) in source.slots:
                    self.slots[target * size + offset] = source.slots[slot]
            self.num_copied += 1

    def wipe(self, block_id: int) -> None:
        for offset in range(self.block_size):
            self.slots.pop(block_id * self.block_size + offset, None)


class FakeForward:
    """`gate`: while it is cleared, steps wait; `num_begun` counts those too. `poison`: a token
    after which nothing is finite. `adapters`: those of the rows. `pause_after`: the number of steps
    after which the gate is cleared."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun = 0
        self.num_steps = 0
        self.num_copies = 0
        self.poison: int | None = None
        self.poisoned_by = Fault.NOT_FINITE
        self.pause_after = 0
        self.adapters: set[object] = set()

    def yield_device(self, wait: Wait) -> None:
        pass

    def on_idle(self) -> None:
        pass

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> CompleteFlight:
        assert rows or copies
        self.num_copies += bool(copies)
        if copies:
            with self.arena.lock:
                self.arena.copy_within(copies)
        return CompleteFlight(self._run(rows) if rows else ())

    def _run(self, rows: Sequence[Row]) -> list[RowResult]:
        self.num_begun += bool(rows)
        self.adapters |= {row.adapter for row in rows if row.adapter}
        assert self.gate.wait(30)
        self.num_steps += bool(rows)
        if self.num_steps == self.pause_after:
            self.gate.clear()
        with self.arena.lock:
            self._check_writes(rows)
            return [self._row(row) for row in rows]

    def _check_writes(self, rows: Sequence[Row]) -> None:
        """No row writes a slot that another row reads or writes."""
        size = self.arena.block_size
        readers = Counter(block_id for row in rows for block_id in row.block_table)
        for row in rows:
            end = row.start + len(row.token_ids)
            first = max(row.start, row.store_from) // size
            for block_id in row.block_table[first : -(-end // size)]:
                assert readers[block_id] == 1, "a shared block is never written"

    def _row(self, row: Row) -> RowResult:
        end = row.start + len(row.token_ids)
        for position, token in zip(range(row.start, end), row.token_ids, strict=True):
            if position >= row.store_from:
                slot = self._slot(row, position)
                stamp = self.arena.stamps.read(slot // self.arena.block_size)
                assert stamp.state is StampState.PRIVATE, "a finished block is never written again"
                self.arena.slots[slot] = position, token
        self.arena.num_computed += len(row.token_ids)
        context = []
        for position in range(end):
            stored_position, token = self.arena.slots[self._slot(row, position)]
            assert stored_position == position
            context.append(token)
        if row.num_drafts:
            return self._verified(row, context)
        if row.draws and self.poison in context:
            return self.poisoned_by
        return _drawn(row, context)

    def _verified(self, row: Row, context: list[int]) -> RowResult:
        """A token for each draft's position and one after the last, as if drawn one by one; none
        after a draft behind which nothing is finite."""
        first = len(context) - row.num_drafts
        alone = replace(row, num_drafts=0, draws=row.draws[:1])
        ends = range(first, len(context) + 1)
        drawn = [_drawn(alone, context[:end]) for end in ends if self.poison not in context[:end]]
        if not drawn:
            return Fault.NOT_FINITE
        outputs = [one if isinstance(one, RowOutput) else RowOutput(one) for one in drawn]  # type: ignore[arg-type]
        tokens = tuple(token for one in outputs for token in one.tokens)
        logprobs = tuple(each for one in outputs for each in one.logprobs)
        return RowOutput(tokens, logprobs) if logprobs else tokens

    def _slot(self, row: Row, position: int) -> int:
        size = self.arena.block_size
        return row.block_table[position // size] * size + position % size


def logprobs_of(tokens: Sequence[int], num_top: int) -> Logprobs:
    """The logprobs of the last token, which depend on all of them."""
    digest = xxhash.xxh32_intdigest(repr(list(tokens)).encode())
    return replace(likeliest_tokens(tokens[:-1], num_top), logprob=-float(digest % 100))


def _drawn(row: Row, context: list[int]) -> RowResult:
    """`context`: all tokens up to the row's end."""
    tokens = tuple(next_token(context, draw) for draw in row.draws)
    num_top = row.draws[0].sampling.logprobs if row.draws else None
    if row.scoring is None and num_top is None:
        return tokens
    prompt = []
    if row.scoring is not None:
        known = [*context, *row.scoring.token_ids[-1:]]
        for offset, token_id in enumerate(row.scoring.token_ids):
            position = row.start + offset + 1
            assert known[position] == token_id
            prompt.append(logprobs_of(known[: position + 1], row.scoring.num_top))
    asked = () if num_top is None else tokens
    drawn = tuple(logprobs_of([*context, token], num_top or 0) for token in asked)
    return RowOutput(tokens, drawn, LogprobColumns.of(prompt) if prompt else None)


class FakeSession:
    """`began`, `waiting`: the reports of requests that begin, and that wait for blocks; `sent`: the
    events of each request, in order. While it does not read (`reads`), none of its events is
    delivered."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.began: list[str] = []
        self.waiting: list[AwaitsBlocks] = []
        self.sent: list[str] = []
        self.reads = True
        self._unread: list[Callable[[], None]] = []

    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        if isinstance(event, Began):
            self.began.append(event.request_id)
        elif isinstance(event, AwaitsBlocks):
            self.waiting.append(event)
        else:
            self.events.append(event)
        self.sent += (
            f"{type(event).__name__} {request_id}" for request_id in _request_ids_of(event)
        )
        if then is not None:
            self._unread.append(then)
        if self.reads:
            self.read()

    def read(self) -> None:
        while self._unread:
            self._unread.pop(0)()

    def finish(self) -> None: ...

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def _request_ids_of(event: WorkerEvent) -> list[str]:
    match event:
        case Step(outputs):
            return [output.request_id for output in outputs]
        case DrainNotice():
            return []
        case _:
            return [event.request_id]


async def make_pool(
    store: MemoryStore, num_blocks: int, block_size: int, pool_id: str = "pool", version: str = ""
) -> PoolSpec:
    fingerprint = f"fingerprint{version}"
    spec = PoolSpec(pool_id, "model", fingerprint, num_blocks, block_size, block_bytes=1)
    await store.register_pool(spec)
    return spec


async def join(store: MemoryStore, spec: PoolSpec, worker_id: str, stamps: Stamps) -> Any:
    await store.register_worker(
        spec,
        worker_id,
        mark_owned=lambda holder_id, block_ids: stamps.mark_owned(block_ids, holder_id),
    )
    return SimpleNamespace(spec=spec, worker_id=worker_id, stamps=stamps)


def make_stamps(path: Any, spec: PoolSpec) -> CheckedStamps:
    path.write_bytes(bytes(spec.num_blocks * record_bytes(spec.block_size)))
    return CheckedStamps(path, spec.num_blocks, spec.block_size)


def asked(
    n: int = 1,
    max_tokens: int = 16,
    prompt: Sequence[int] = PROMPT,
    number: int = 1,
    **changes: Any,
) -> Ticket:
    """A request for `n` samples. `changes`: of its sampling parameters."""
    return ticket(
        f"r{number}",
        prompt,
        sampling=replace(SAMPLED, max_tokens=max_tokens, **changes),
        sequences=tuple(TicketSequence(index) for index in range(n)),
    )


def right(index: int, num_tokens: int = 16, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """The tokens of a sample."""
    return tuple(expected(prompt, num_tokens, Draw(SAMPLED, index)))


def ticket(request_id: str, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> Ticket:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "order": int(request_id.lstrip("r")),
        "pool_id": "pool",
        "holder_id": f"h-{request_id}",
        "holder_epoch": 0,
        "root_hash": bytes(16),
        "prompt_token_ids": tuple(prompt),
        "sampling": replace(GREEDY, max_tokens=max_tokens),
        "sequences": (TicketSequence(0),),
    }
    return Ticket(**{**fields, **changes})
