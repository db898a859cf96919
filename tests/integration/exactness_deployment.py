"""A whole Quire in one event loop: the real gateway and real workers on one pool, a real model.
What they say to each other goes through the wire's messages, as bytes. Decode workers can be made
to stand still in the middle of an answer, and lose it there in every way that there is."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from blockstore.memory_registry import MemoryRegistry
from blockstore.memory_store import MemoryStore
from blockstore.records import Allocation, PrefixHash
from blockstore.registry import Member, Role
from blockstore.store import FUNCTION_LIBRARY
from quire import messages
from quire.messages import Request
from quire.types import Delta
from quire.v1 import worker_pb2
from services.common.runtime.metrics import WorkerMetrics
from services.decode.service import DecodeService
from services.decode.worker import DecodeWorker
from services.engine.forward import ForwardPass
from services.engine.sequences.sequence import Sequence as DecodingSequence
from services.gateway.change_notifier import ChangeNotifier
from services.gateway.config import GatewayOptions
from services.gateway.frontend.service import InferenceService
from services.gateway.gateway import Gateway
from services.gateway.request_metrics import RequestMetrics
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.scheduling.migration import Migration
from services.gateway.scheduling.router import Router
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.wire import DECODE, PREFILL, StreamType
from services.gateway.workers.worker import Worker
from services.prefill.service import PrefillService
from services.prefill.worker import PrefillWorker
from services.protocol.codec import load_from_wire
from services.protocol.messages import Began, Command, LoadReport
from services.protocol.version import PROTOCOL_VERSION
from services.worker.events import HANDED_OVER
from services.worker.grammars import Grammars
from services.worker.limits import Limits
from services.worker.pool_worker import WorkerParts
from services.worker.swap.pool import SwapPool
from tests.drafting import oracle
from tests.exactness import SEED, Answer
from tests.late_device import Device, LateForward, computes_at_launch
from tests.unit.workers.fakes import join, make_pool, make_stamps

from .exactness_model import LIMIT_S, Logits, Models, Watched

MODEL = "toy"
MAX_MODEL_LEN = 512
HELLO = worker_pb2.Hello(
    peer_id="gateway", protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
)


@dataclass(frozen=True, slots=True)
class Setting:
    """`chunk`: tokens that a prefill worker computes in one step. `speculates`: the decode workers
    verify drafts, of which every second one is wrong."""

    block_size: int = 8
    num_blocks: int = 1200
    num_swap_blocks: int = 0
    chunk: int = 64
    num_threads: int = 1
    num_prefills: int = 1
    num_decoders: int = 2
    device: Device = computes_at_launch
    speculates: bool = False


class ForgetfulStore(MemoryStore):
    """`forgets`: from now on nothing that is cached is found."""

    forgets = False

    async def allocate(
        self,
        pool_id: str,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        found = ((), ()) if self.forgets and pool_id == "pool" else (hashes, branches)
        asked = holder_id, worker_id, order, found[0], num_blocks, found[1]
        return await super().allocate(pool_id, *asked)


class Line:
    """A stream to a worker without gRPC: `services.gateway.workers.connection.Peer`'s part.
    `connect`: the service's. Of one that `is_cut` nobody hears anything more."""

    def __init__(self, member: Member, connect: Callable[..., Any], sink: Dispatcher) -> None:
        self.worker = Worker(member, self._send)
        self.is_cut = False
        self.num_begun = 0
        self._stream_type: StreamType = PREFILL if member.role == "prefill" else DECODE
        self._sink = sink
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._outgoing.put_nowait(self._stream_type.request(hello=HELLO))
        self._listening = asyncio.create_task(self._listen(connect))

    def cut(self) -> None:
        """Its worker has died."""
        self.is_cut, self.worker.connected = True, False
        self._sink.on_lost(self.worker, died=True)
        self._sink.on_change()

    async def close(self) -> None:
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening

    def _send(self, command: Command) -> None:
        self._outgoing.put_nowait(self._stream_type.command(command))

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield through_wire(await self._outgoing.get())

    async def _listen(self, connect: Callable[..., Any]) -> None:
        async for message in connect(self._requests(), None):
            if not self.is_cut:
                self._hear(through_wire(message))

    def _hear(self, message: Any) -> None:
        if message.HasField("welcome"):
            self.worker.report(load_from_wire(message.welcome.load))
            self.worker.connected = True
            self._sink.on_change()
        for event in self._stream_type.events(message):
            if isinstance(event, LoadReport):
                self.worker.report(event)
                self._sink.on_report(self.worker)
            else:
                self.num_begun += isinstance(event, Began)
                self._sink.on_event(self.worker, event)  # type: ignore[arg-type]


def through_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@dataclass(eq=False)
class Resident:
    """A worker, what it computes, and what it counts."""

    worker: Any
    forward: Watched
    service: Any
    request_metrics: CollectorRegistry
    swap_pool: SwapPool | None
    device: ForwardPass
    running: "asyncio.Task[None]"

    def figure(self, name: str) -> float:
        value = self.request_metrics.get_sample_value(f"quire:{name}_total")
        assert value is not None
        return value

    @property
    def num_seen(self) -> int:
        """Tokens of what is compared that it has computed."""
        return sum(row.num_tokens for row in self.forward.seen)


@dataclass(eq=False)
class Call:
    """`deltas`: what the client has by now."""

    deltas: list[Delta] = field(default_factory=list)
    reading: "asyncio.Task[None]" = field(init=False)

    async def answer(self) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            await self.reading
        return Answer.of(self.deltas)


class ExactnessDeployment:
    """`prompt`: of what is compared. `known`: its tokens by sequence, which become drafts."""

    known: Mapping[int, Sequence[int]] = {}

    def __init__(
        self, directory: Path, models: Models, setting: Setting, prompt: tuple[int, ...]
    ) -> None:
        self.setting = setting
        self.store, self.registry = ForgetfulStore(), MemoryRegistry()
        self.prefills: list[Resident] = []
        self.decoders: list[Resident] = []
        self.request_metrics = CollectorRegistry()
        self._directory = directory
        self._models = models
        self._prompt = prompt
        self._residents: dict[str, Resident] = {}
        self._lines: dict[str, Line] = {}
        self._calls: list[Call] = []

    async def open(self) -> None:
        setting, config = self.setting, self._models.of("prefill-0", 1)[0].config
        sizes = {"pool": setting.num_blocks, "colder": setting.num_swap_blocks}
        shape = (config.num_layers, 2, setting.block_size, config.num_kv_heads, config.head_dim)
        self._pools: dict[str, tuple[Any, Any, torch.Tensor]] = {}
        for pool_id, num_blocks in sizes.items():
            if num_blocks:
                spec = await make_pool(self.store, num_blocks, setting.block_size, pool_id)
                stamps = make_stamps(self._directory / pool_id, spec)
                arena = torch.full((num_blocks, *shape), float("nan"), dtype=torch.bfloat16)
                stamps.check = partial(_check_finished, arena)
                self._pools[pool_id] = spec, stamps, arena
        changes, request_metrics = ChangeNotifier(), RequestMetrics(self.request_metrics)
        self.directory = WorkerDirectory(
            *(self.registry, self.store, self._connect, lambda _: self._models.text, changes.notify)
        )
        router, options = Router(self.store, b"secret"), GatewayOptions()
        self.dispatcher = Dispatcher(
            self.directory, router, self.registry, options, changes, request_metrics.record_end
        )
        for number in range(setting.num_prefills):
            self.prefills.append(await self._add("prefill", number))
        for number in range(setting.num_decoders):
            self.decoders.append(await self._add("decode", number))
        await self.directory.refresh()
        gateway = Gateway(self.directory, self.dispatcher, changes, request_metrics, options)
        self._service = InferenceService(gateway)
        migration = Migration(self.directory, self.dispatcher, changes, options.reserve_timeout_s)
        self._moving = asyncio.create_task(migration.drain_workers())
        await self.until(lambda: all(line.worker.connected for line in self._lines.values()))

    async def close(self) -> None:
        self.pause((*self.prefills, *self.decoders), every=0)
        self.go_on()
        await self.hang_up()
        self._moving.cancel()
        await asyncio.wait([self._moving])
        await self.dispatcher.close()
        for resident in self._residents.values():
            resident.running.cancel()
        running = [resident.running for resident in self._residents.values()]
        await asyncio.wait(running)
        for line in self._lines.values():
            await line.close()
        for resident in self._residents.values():
            if resident.swap_pool:
                resident.swap_pool.close()

    # ── its workers ──────────────────────────────────────────────────────────────────────────────

    async def _add(self, role: Role, number: int) -> Resident:
        name, setting = f"{role}-{number}", self.setting
        spec, stamps, arena = self._pools["pool"]
        membership = await join(self.store, spec, name, stamps)
        request_metrics = CollectorRegistry()
        metrics = WorkerMetrics(request_metrics)
        model, ops = self._models.of(name, setting.num_threads)
        forward = Watched(model, arena, setting.block_size, ops)
        forward.prompt = self._prompt
        swap_pool: SwapPool | None = None
        if "colder" in self._pools:
            colder_spec, colder_stamps, colder_arena = self._pools["colder"]
            swap_pool = SwapPool(
                self.store,
                membership,
                await join(self.store, colder_spec, name, colder_stamps),
                partial(_copy, ops, arena, colder_arena),
                partial(_copy, ops, colder_arena, arena),
                metrics,
                compares_costs=False,
            )
        limits = Limits(
            max_num_seqs=128,
            max_num_batched_tokens=setting.chunk if role == "prefill" else 256,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=model.config.vocab_size,
            speculation=oracle(self._next_known, 2, 2) if setting.speculates else None,
        )
        make, serve = (
            (PrefillWorker, PrefillService) if role == "prefill" else (DecodeWorker, DecodeService)
        )
        device = setting.device(forward)
        grammars = Grammars(self._models.directory, limits.vocab_size, model.config.eos_token_ids)
        parts = WorkerParts(
            *(self.store, membership, device, limits, metrics, swap_pool), grammars=grammars
        )
        worker: Any = make(parts)
        running = asyncio.create_task(worker.run())
        resident = Resident(
            worker, forward, serve(worker), request_metrics, swap_pool, device, running
        )
        self._residents[name] = resident
        member = Member(
            member_id=name,
            role=role,
            address="nowhere:1",
            state="serving",
            started_unix_ms=1,
            protocol_version=PROTOCOL_VERSION,
            pool_id="pool",
            model=MODEL,
            model_dir=str(self._models.directory),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=limits.max_num_seqs,
        )
        await self.registry.announce(member, ttl_s=1e6)
        return resident

    def _next_known(self, sequence: DecodingSequence, tokens: list[int]) -> int | None:
        """Companions get drafts that are hardly ever right."""
        rules = sequence.rules
        if rules.sampling.seed != SEED:
            return tokens[-1]
        number, answer = len(tokens) - rules.num_prompt_tokens, self.known.get(sequence.index, ())
        return answer[number] if number < len(answer) else None

    def _connect(self, member: Member) -> Line:
        service = self._residents[member.member_id].service
        self._lines[member.member_id] = Line(member, service.Connect, self.dispatcher)
        return self._lines[member.member_id]

    def line(self, resident: Resident) -> Line:
        return self._lines[resident.worker.worker_id]

    # ── its clients ──────────────────────────────────────────────────────────────────────────────

    def call(self, request: Request) -> Call:
        call = Call()
        call.reading = asyncio.create_task(self._read(call, request))
        self._calls.append(call)
        return call

    async def _read(self, call: Call, request: Request) -> None:
        asked = through_wire(messages.generate_request(request))
        no_deadline: Any = SimpleNamespace(time_remaining=lambda: None)
        async for response in self._service.Generate(asked, no_deadline):
            call.deltas += messages.deltas(through_wire(response))

    async def ask(self, request: Request) -> Answer:
        return await self.call(request).answer()

    async def hang_up(self) -> None:
        """All clients leave."""
        for call in self._calls:
            call.reading.cancel()
        await asyncio.gather(*(call.reading for call in self._calls), return_exceptions=True)
        self._calls.clear()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                for resident in self._residents.values():
                    if resident.running.done() and not resident.running.cancelled():
                        resident.running.result()
                for call in self._calls:
                    if call.reading.done() and not call.reading.cancelled():
                        call.reading.result()
                await asyncio.sleep(0.001)

    async def until_empty(self) -> None:
        """Nobody holds or waits for anything, and every law of the ledgers is true."""
        for pool_id in self._pools:
            ledger = self.store.ledger(pool_id)
            await self.until(lambda ledger=ledger: not (ledger.holders or ledger.waiters))  # type: ignore[misc]
            assert (await self.store.audit(pool_id)).violations == ()

    @property
    def late_decoders(self) -> list[LateForward]:
        return [d.device for d in self.decoders if isinstance(d.device, LateForward)]

    @property
    def num_moves(self) -> float:
        moved = self.request_metrics.get_sample_value(
            "quire:num_moves_total", {"model_name": MODEL}
        )
        return moved or 0.0

    def logits(self) -> Logits:
        whole: Logits = defaultdict(set)
        for resident in self._residents.values():
            for key, found in resident.forward.logits_of.items():
                whole[key] |= found
        return whole

    # ── what happens to an answer in its middle ──────────────────────────────────────────────────

    async def until_paused(self, residents: Sequence[Resident]) -> Resident:
        """Which of them stands still; what it has said before is heard."""
        await self.until(lambda: any(r.forward.is_paused for r in residents))
        (there,) = (r for r in residents if r.forward.is_paused)
        await asyncio.sleep(0)
        return there

    def pause(self, residents: Sequence[Resident], every: int) -> None:
        """Stand still after every so many steps of what is compared; 0: not any more."""
        for resident in residents:
            resident.forward.pause_every = every

    def go_on(self) -> None:
        for resident in self._residents.values():
            resident.forward.go_on()

    async def preempt(self, there: Resident) -> None:
        """The pool wants all blocks of what runs there."""
        there.worker.preempt([job.ticket.holder_id for job in there.worker._jobs])
        self.go_on()

    async def drain(self, there: Resident) -> None:
        """It goes on at another decode worker, with its blocks."""
        there.worker.drain()
        await self.until(lambda: all(job.ending is HANDED_OVER for job in there.worker._jobs))
        self.go_on()

    async def kill(self, there: Resident) -> None:
        """After the step in flight; nothing of that is heard, nor written to the store."""
        self.line(there).cut()
        await self.registry.withdraw(there.worker.worker_id)
        there.running.cancel()
        there.worker.engine.send(None)  # no other step begins
        there.forward.go_on()
        await asyncio.wait([there.running])
        for pool_id in self._pools:
            await self.store.reap(pool_id, there.worker.worker_id)
        await self.directory.refresh()
        self.go_on()


def _check_finished(arena: torch.Tensor, block_id: int, token_ids: Sequence[int]) -> None:
    assert not arena[block_id].isnan().any(), "stamped before its KV is there"


def _copy(
    ops: Any, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    ops.copy_blocks(target, torch.tensor(pairs, dtype=torch.int64).view(-1, 2), source)
