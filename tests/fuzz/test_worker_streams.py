"""A hostile gateway at the workers' streams: whatever it says, and however well it knows somebody
else's request, that request goes on untouched, no row reads a block that is not its holder's, and
of the hostile one nothing is left when its streams have ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from blockstore.ledger import Ledger
from blockstore.memory_store import MemoryStore
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2, worker_pb2
from services.common.errors import InvalidRequest, VersionMismatch
from services.common.metrics import WorkerMetrics
from services.common.version import PROTOCOL_VERSION
from services.common.wire import ticket_to_wire
from services.decode.service import DecodeService
from services.decode.worker import DecodeWorker
from services.engine.batch import Drawn, Row
from services.prefill.service import PrefillService
from services.prefill.worker import PrefillWorker
from services.worker.pool_worker import Limits
from tests.unit.workers.fakes import (
    VOCAB,
    Arena,
    FakeForward,
    expected,
    join,
    make_pool,
    make_stamps,
    next_token,
    ticket,
)

LIMIT_S = 20.0
LIMITS = Limits(
    8, 64, max_model_len=64, vocab_size=VOCAB, look_ahead=2, ticket_ttl_s=0.2, park_window_s=0.05
)
HONEST = ticket("r1", range(30_000, 30_014), max_tokens=24, attempt=7)
HONEST_TOKENS = expected(HONEST.prompt_token_ids, 24)
MINE = ticket("r2", range(10), max_tokens=12)
HELLO = worker_pb2.Hello(
    peer_id="hostile", protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
)


class GuardedForward(FakeForward):
    """The blocks of a row are one holder's, and no two rows have the same holder: or it notes what
    it saw. A slot that was never written reads as token 0: whoever says that it was computed lies
    about its own KV."""

    def __init__(self, arena: Arena, ledger: Ledger) -> None:
        super().__init__(arena)
        self._ledger = ledger
        self.crimes: list[str] = []

    def run(self, rows: Sequence[Row]) -> list[Drawn]:
        holders = [self._holder_of(row) for row in rows]
        if len(set(holders)) != len(holders):
            self.crimes.append(f"two rows of one holder: {holders}")
        return super().run(rows)

    def _holder_of(self, row: Row) -> str:
        blocks = set(row.block_table[: -(-(row.start + len(row.token_ids)) // 4)])
        owners = [h.holder_id for h in list(self._ledger.holders.values()) if blocks <= h.held]
        if not owners:
            self.crimes.append(f"blocks {sorted(blocks)} are no holder's")
        return owners[0] if len(owners) == 1 else f"one of {len(owners)}, from {row.start}"

    def _row(self, row: Row) -> Drawn:
        size = self.arena.block_size
        for position in range(row.start):
            slot = row.block_table[position // size] * size + position % size
            self.arena.slots.setdefault(slot, (position, 0))
        return super()._row(row)


@dataclass
class Stream:
    """One gateway's side of `Connect`, in process; what it is told, in order."""

    serve: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]
    request: Callable[..., Any]

    def __post_init__(self) -> None:
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: list[Any] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with contextlib.suppress(InvalidRequest, VersionMismatch):
            async for message in self.serve(self._requests()):
                self.heard.append(message)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def say(self, **command: Any) -> None:
        message = self.request(**command)
        self._outgoing.put_nowait(type(message).FromString(message.SerializeToString()))

    def hear(self, kind: str) -> list[Any]:
        return [getattr(one, kind) for one in self.heard if one.WhichOneof("event") == kind]

    async def end(self) -> None:
        self._outgoing.put_nowait(None)
        await self.task


class Workers:
    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.models: list[GuardedForward] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, directory: Path) -> None:
        spec = await make_pool(self.store, 32, 4)
        stamps = make_stamps(directory / "stamps", spec)
        arena = Arena(4, stamps)
        workers: list[Any] = []
        for cls in (PrefillWorker, DecodeWorker):
            membership = await join(self.store, spec, cls.__name__, stamps)
            self.models.append(GuardedForward(arena, self.store.ledger("pool")))
            metrics = WorkerMetrics(CollectorRegistry())
            workers.append(cls(self.store, membership, self.models[-1], LIMITS, metrics))
            self._tasks.append(asyncio.create_task(workers[-1].run()))
        self._prefill, self._decode = PrefillService(workers[0]), DecodeService(workers[1])

    def connect(self) -> tuple[Stream, Stream]:
        """To prefill and decode, without a hello yet."""
        return (
            Stream(lambda r: self._prefill.Connect(r, None), prefill_pb2.PrefillConnectRequest),
            Stream(lambda r: self._decode.Connect(r, None), decode_pb2.DecodeConnectRequest),
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                for task in self._tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        for model in self.models:
            model.gate.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# What the hostile gateway says

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 10, 13, 14, 15, 31, 32, 63, 64, 65, 2**31, 2**32 - 1])
LARGE = NUMBERS | st.sampled_from([2**52 - 1, 2**52, 2**53, 2**63, 2**64 - 1])
REQUESTS = st.sampled_from(["r1", "r2", "r2", "r2", "", "x" * 300])
FLOATS = st.sampled_from([0.0, -1.0, 0.5, 1.0, 1e30, float("nan"), float("inf")])
BLOCKS = st.lists(st.integers(0, 33), max_size=6)


def _set(path: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(path), values)


CHANGES = st.one_of(
    _set("request_id", REQUESTS),
    _set("attempt", NUMBERS),
    _set("order", LARGE),
    _set("pool_id", st.sampled_from(["pool", "", "other", "{}", "x" * 300])),
    _set("holder_id", st.sampled_from(["h-r1", "h-r2", "h-r2", "h-new", "h-r2+", "", "x" * 300])),
    _set("holder_epoch", LARGE),
    _set("root_hash", st.sampled_from([bytes(16), b"x" * 16, b"", bytes(15)])),
    _set("timeout_ms", LARGE),
    _set("num_cached_tokens", NUMBERS),
    _set("prompt_token_ids", st.lists(NUMBERS, max_size=70)),
    _set("prompt_token_ids", st.just(HONEST.prompt_token_ids)),
    _set("sequences.index", NUMBERS),
    _set("sequences.token_ids", st.lists(NUMBERS, max_size=16)),
    _set("sequences.block_ids", BLOCKS),
    _set("sequences.num_computed_tokens", NUMBERS),
    _set("sampling.temperature", FLOATS),
    _set("sampling.top_p", FLOATS),
    _set("sampling.min_p", FLOATS),
    _set("sampling.top_k", NUMBERS),
    _set("sampling.seed", LARGE),
    _set("sampling.max_tokens", NUMBERS),
    _set("sampling.stop_token_ids", st.lists(NUMBERS, max_size=5)),
    _set("sequences", st.sampled_from(["none", "twice"])),
)


@dataclass(frozen=True)
class Say:
    """`to`: 0 prefill, 1 decode. `base`: the ticket that is forged, if there is one."""

    to: int
    command: str
    request_id: str = "r2"
    attempt: int = 1
    number: int = 1
    base: str = "fresh"
    changes: tuple[tuple[str, Any], ...] = ()
    pause: bool = False


SAYINGS = st.lists(
    st.builds(
        Say,
        to=st.integers(0, 1),
        command=st.sampled_from(
            ["ticket"] * 6 + ["reserve"] * 3 + ["abort", "hand_over", "hello", "nothing", "wrong"]
        ),
        request_id=REQUESTS,
        attempt=st.sampled_from([1, 1, 1, 1, 7, 2]),
        number=st.sampled_from([1, 1, 1, 1, 0, 2, 9, 2**32 - 1]),
        base=st.sampled_from(["fresh", "issued", "issued", "honest"]),
        changes=st.lists(CHANGES, max_size=2).map(tuple),
        pause=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def forge(base: ticket_pb2.Ticket, changes: Sequence[tuple[str, Any]]) -> ticket_pb2.Ticket:
    forged = ticket_pb2.Ticket()
    forged.CopyFrom(base)
    for path, value in changes:
        where, _, name = path.rpartition(".")
        if path == "sequences":
            copies = list(forged.sequences) * 2 if value == "twice" else []
            del forged.sequences[:]
            forged.sequences.extend(copies)
            continue
        for target in {"sampling": [forged.sampling], "sequences": forged.sequences}.get(
            where, [forged]
        ):
            _assign(target, name, value)
    return forged


def _assign(message: Any, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        message.ClearField(name)
        getattr(message, name).extend(value)
        return
    with contextlib.suppress(ValueError):  # beyond what the field can carry
        setattr(message, name, value)


def utter(saying: Say, streams: tuple[Stream, Stream], tickets: dict[str, Any]) -> None:
    stream = streams[saying.to]
    key: dict[str, Any] = {"request_id": saying.request_id, "attempt": saying.attempt}
    match saying.command, saying.to:
        case "ticket", 0:
            forged = forge(tickets[saying.base], saying.changes)
            stream.say(submit=prefill_pb2.PrefillSubmit(ticket=forged))
        case "ticket", _:
            forged = forge(tickets[saying.base], saying.changes)
            own: dict[str, Any] = {"request_id": forged.request_id, "attempt": forged.attempt}
            stream.say(reserve=decode_pb2.Reserve(num_sequences=1, **own))
            stream.say(admit=decode_pb2.Admit(ticket=forged))
        case "reserve", 1:
            stream.say(reserve=decode_pb2.Reserve(num_sequences=saying.number, **key))
        case "hand_over", 1:
            stream.say(hand_over=decode_pb2.HandOver(**key))
        case "hello", _:
            stream.say(hello=HELLO)
        case "wrong", _:
            stream.say(hello=worker_pb2.Hello(peer_id="x" * 100_000, protocol_version=99))
        case "nothing", _:
            stream.say()
        case _:
            stream.say(abort=worker_pb2.Abort(**key))


# The honest one


async def honest(
    workers: Workers, midway: Callable[[ticket_pb2.Ticket], Awaitable[None]]
) -> list[int]:
    """Its walk through prefill and decode, with `midway` when its ticket is at rest and when it
    runs; its tokens."""
    prefill, decode = workers.connect()
    for stream in (prefill, decode):
        stream.say(hello=HELLO)
    key: dict[str, Any] = {"request_id": HONEST.request_id, "attempt": HONEST.attempt}
    decode.say(reserve=decode_pb2.Reserve(num_sequences=1, **key))
    prefill.say(submit=prefill_pb2.PrefillSubmit(ticket=ticket_to_wire(HONEST)))
    await workers.until(lambda: bool(prefill.hear("prefilled")))
    issued = prefill.hear("prefilled")[0].ticket
    await midway(issued)
    decode.say(admit=decode_pb2.Admit(ticket=issued))

    def outputs() -> list[Any]:
        return [output for step in decode.hear("step") for output in step.outputs]

    await workers.until(lambda: any(output.finish_reason for output in outputs()))
    assert not decode.hear("failed")
    assert not decode.hear("requeue")
    tokens = [output.token_ids[0] for output in outputs()]
    await asyncio.gather(prefill.end(), decode.end())
    return [issued.sequences[0].token_ids[0], *tokens]


async def live(directory: Path, before: Sequence[Say], amid: Sequence[Say]) -> None:
    workers = Workers(MemoryStore())
    await workers.open(directory)
    streams = workers.connect()
    tickets: dict[str, Any] = {"fresh": ticket_to_wire(MINE)}
    try:
        for stream in streams:
            stream.say(hello=HELLO)
        streams[0].say(submit=prefill_pb2.PrefillSubmit(ticket=tickets["fresh"]))
        await workers.until(lambda: bool(streams[0].hear("prefilled")))
        tickets["issued"] = streams[0].hear("prefilled")[0].ticket

        async def attack(sayings: Sequence[Say]) -> None:
            for saying in sayings:
                utter(saying, streams, tickets)
                await asyncio.sleep(0.001 if saying.pause else 0)

        async def midway(issued: ticket_pb2.Ticket) -> None:
            """It knows all of the honest ticket but the epoch: who has that too is its bearer."""
            tickets["honest"] = forge(issued, [("holder_epoch", 3)])
            await attack(before)
            attacks.append(asyncio.create_task(attack(amid)))

        attacks: list[asyncio.Task[None]] = []
        assert await honest(workers, midway) == HONEST_TOKENS
        await asyncio.gather(*attacks)
        await asyncio.gather(*(stream.end() for stream in streams))
        ledger = workers.store.ledger("pool")
        await workers.until(lambda: not ledger.holders and not ledger.waiters)
        assert (await workers.store.audit("pool")).violations == ()
        assert [model.crimes for model in workers.models] == [[], []]
    finally:
        await workers.close()


@given(before=SAYINGS, amid=SAYINGS)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_hostile_gateway_harms_nobody(
    tmp_path: Path, before: Sequence[Say], amid: Sequence[Say]
) -> None:
    asyncio.run(live(tmp_path, before, amid))


def test_the_honest_ones_tokens_are_its_own() -> None:
    assert HONEST_TOKENS[0] == next_token(HONEST.prompt_token_ids)
