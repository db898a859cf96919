"""A prefill and a decode worker behind their services, in one process, on a pool and a swap pool.
Their model records every read of a block that belongs to another holder."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from blockstore.memory.ledger import Ledger
from blockstore.memory_store import MemoryStore
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import decode_pb2, prefill_pb2, worker_pb2
from services.engine.batch import Row, RowResult
from services.engine.sequences.group import Group
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import InvalidRequest, VersionMismatch
from services.runtime.metrics import WorkerMetrics
from services.runtime.rpc.message_batching import unpack_batch
from services.worker.limits import Limits
from services.worker.pool_worker import PoolWorker
from services.worker.roles import ROLES
from services.worker.stream import WorkerStream
from services.worker.swap.pool import SwapPool
from tests.late_device import CompleteFlight
from tests.unit.workers.fake_pools import FakePools
from tests.unit.workers.fakes import VOCAB, Arena, FakeForward
from tests.waiting import until

LIMIT_S = 20.0
POOLS = ("pool", "colder")
NUM_BLOCKS = 640
LIMITS = Limits(
    2048,
    2048,
    max_model_len=64,
    vocab_size=VOCAB,
    look_ahead=2,
    ticket_ttl_s=LIMIT_S,
    swapped_ttl_s=LIMIT_S,
    park_window_s=0.05,
)
HELLO = worker_pb2.Hello(
    peer_id="gateway", protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
)


class GuardedForward(FakeForward):
    """Each row may read only blocks of its group's holder; other reads are recorded. A slot that
    was never written reads as token 0: a client that claims its KV was computed corrupts only its
    own request."""

    def __init__(self, arena: Arena, ledger: Ledger) -> None:
        super().__init__(arena)
        self._ledger = ledger
        self.violations: list[str] = []
        self.groups: Callable[[], Sequence[Group]] = list
        """The groups in the engine."""

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> CompleteFlight:
        holder_of = {
            id(sequence.block_table): group.key
            for group in self.groups()
            for sequence in group.sequences
        }
        for row in rows:
            self._look_at(row, holder_of[id(row.block_table)])
        return super().launch(rows, copies)

    def _look_at(self, row: Row, holder_id: str) -> None:
        read = set(row.block_table[: -(-(row.start + len(row.token_ids)) // 4)])
        holder = self._ledger.holders.get(holder_id)
        if holder is None or not read <= holder.held:
            held = None if holder is None else sorted(holder.held)
            self.violations.append(f"{holder_id} holds {held}, and reads {sorted(read)}")

    def _row(self, row: Row) -> RowResult:
        size = self.arena.block_size
        for position in range(row.start):
            slot = row.block_table[position // size] * size + position % size
            self.arena.slots.setdefault(slot, (position, 0))
        return super()._row(row)


@dataclass
class Stream:
    """A gateway's side of `Connect`, in process, with the events in order."""

    serve: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]
    request: Callable[..., Any]

    def __post_init__(self) -> None:
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.events: list[Any] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(InvalidRequest, VersionMismatch):
            async for message in self.serve(self._requests()):
                self.events += unpack_batch(message)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def send(self, **command: Any) -> None:
        message = self.request(**command)
        self._outgoing.put_nowait(type(message).FromString(message.SerializeToString()))

    def events_of(self, kind: str) -> list[Any]:
        return [getattr(one, kind) for one in self.events if one.WhichOneof("event") == kind]

    async def end(self) -> None:
        self._outgoing.put_nowait(None)
        await self.task


def _groups_at(worker: Any) -> list[Group]:
    return list(worker.engine._engine._scheduler._groups.values())


class Workers:
    """Both pools have blocks of 4 tokens, and enough blocks and slots for all: a request may keep
    its blocks until its streams end."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.models: list[GuardedForward] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._swap_pool: list[SwapPool] = []

    async def open(self, directory: Path) -> None:
        pools = await FakePools.make(self.store, directory, NUM_BLOCKS, 4, NUM_BLOCKS)
        pools.arena.stamps.check = None  # a forged ticket has tokens for which nobody has KV
        workers: list[Any] = []
        for role in ROLES.values():
            self.models.append(GuardedForward(pools.arena, self.store.ledger("pool")))
            metrics = WorkerMetrics(CollectorRegistry())
            parts = await pools.join(role.__name__, self.models[-1], LIMITS, metrics)
            assert parts.swap_pool is not None
            self._swap_pool.append(parts.swap_pool)
            worker = PoolWorker[Any](parts, role)
            self.models[-1].groups = partial(_groups_at, worker)
            workers.append(worker)
            self._tasks.append(asyncio.create_task(workers[-1].run()))
        self._decoder = workers[1]
        self._prefill, self._decode = map(WorkerStream, workers)

    def connect(self) -> tuple[Stream, Stream]:
        """Connect to prefill and decode, without a hello."""
        return (
            Stream(lambda r: self._prefill.Connect(r, None), prefill_pb2.PrefillConnectRequest),
            Stream(lambda r: self._decode.Connect(r, None), decode_pb2.DecodeConnectRequest),
        )

    def demand(self, holder_id: str) -> None:
        """Demand the request's blocks for another one."""
        self._decoder.role.preempt([holder_id])

    async def until(self, holds: Callable[[], bool]) -> None:

        def all_run_and_it_holds() -> bool:
            for task in self._tasks:
                assert not task.done(), task.exception()
            return holds()

        await until(all_run_and_it_holds, limit_s=LIMIT_S)

    async def check_empty(self) -> None:
        """Nothing is held, all laws hold, and no row read a block of another holder."""
        for pool_id in POOLS:
            ledger = self.store.ledger(pool_id)
            await self.until(lambda ledger=ledger: not ledger.holders and not ledger.waiters)  # type: ignore[misc]
            assert (await self.store.audit(pool_id)).violations == ()
        assert [model.violations for model in self.models] == [[], []]

    async def close(self) -> None:
        for model in self.models:
            model.gate.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for swap_pool in self._swap_pool:
            swap_pool.close()
