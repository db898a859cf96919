"""A whole deployment in one event loop: the real gateway and real workers on one pool, with a real
model. All messages between them are encoded and decoded as on the wire. A test can pause a worker
in the middle of an answer, and then preempt, drain or kill it."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from blockstore.registry import Member, Role
from kvops import int8_kv
from quire import messages
from quire.messages import Request
from services.engine.models import Model
from services.engine.sequences.sequence import Sequence as DecodingSequence
from services.engine.speculation.draft_model import DraftModel
from services.engine.speculation.speculation import Speculation
from services.gateway.access.caller import LOCAL_OPERATOR
from services.gateway.api import GenerationRequest, RetainDirective
from services.gateway.config import PartOptions
from services.gateway.gateway import Gateway
from services.gateway.grpc.service import InferenceService
from services.gateway.request.metrics import RequestMeters
from services.gateway.request.records import Records
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.scheduling.explainer import Explainer
from services.gateway.scheduling.migration import Migration
from services.gateway.scheduling.router import Router
from services.gateway.workers.adapters import GatewayAdapters
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.movers import Movers
from services.protocol.version import PROTOCOL_VERSION
from services.protocol.worker_stream import stream_type
from services.runtime.metrics import WorkerMetrics
from services.worker.adapters import WorkerAdapters
from services.worker.file_cache.block_files import BlockFiles
from services.worker.file_cache.file_cache import FileCache
from services.worker.file_cache.pool_blocks import HostBlocks
from services.worker.grammars import Grammars
from services.worker.limits import Limits
from services.worker.pool_engine import WorkerParts
from services.worker.pool_worker import PoolWorker
from services.worker.roles import ROLES
from services.worker.roles.prefill import Prefill
from services.worker.stream import WorkerStream
from services.worker.swap.pool import SwapPool
from tests.drafting import AsMany, SometimesWrong, oracle
from tests.exactness import SEED, Answer
from tests.grpc_context import FakeContext
from tests.late_device import LateForward
from tests.memory_registry import MemoryRegistry
from tests.unit.workers.fakes import join, make_pool, make_stamps
from tests.waiting import until

from .exactness_model import (
    LIMIT_S,
    NUM_DRAFT_BLOCKS,
    Logits,
    Models,
    Watched,
    draft_model,
)
from .exactness_parts import Call, DeployedWorker
from .exactness_setting import ADAPTER, MODEL, Setting, Store
from .exactness_stream import Stream, through_wire

MAX_MODEL_LEN = 512


class ExactnessDeployment:
    """The gateway and the workers.

    `prompt`: the prompt of the compared request. `known`: the tokens of its answer, by sequence:
    the drafts are made of them.
    """

    known: Mapping[int, Sequence[int]] = {}
    retain: tuple[RetainDirective, ...] = ()
    """The prefixes that all requests ask to retain; only HTTP has fields for that."""

    def __init__(
        self, directory: Path, models: Models, setting: Setting, prompt: tuple[int, ...]
    ) -> None:
        self.setting = setting
        self.store, self.registry = Store(), MemoryRegistry()
        self.prefills: list[DeployedWorker] = []
        self.decoders: list[DeployedWorker] = []
        self.draft_models: dict[str, DraftModel] = {}
        self.request_metrics = CollectorRegistry()
        self._directory = directory
        self._models = models
        self._prompt = prompt
        self._workers: dict[str, DeployedWorker] = {}
        self._streams: dict[tuple[str, Role], Stream] = {}
        self._calls: list[Call] = []

    async def open(self) -> None:
        setting = self.setting
        self._pools: dict[str, tuple[Any, Any, torch.Tensor]] = {}
        await self._add_pool("pool", setting.num_blocks)
        if setting.num_swap_blocks:
            await self._add_pool("colder", setting.num_swap_blocks)
        changes, request_metrics = ChangeNotifier(), RequestMeters(self.request_metrics)
        self.directory = WorkerDirectory(
            self.registry, self.store, self._connect, lambda _: self._models.text, changes.notify
        )
        router, options = Router(self.store, b"secret"), PartOptions(max_loras=1)
        self.dispatcher = Dispatcher(
            self.directory,
            router,
            self.registry,
            options,
            changes,
            request_metrics.record_end,
            Movers(b"").pull,
        )
        for number in range(0 if setting.mix else setting.num_prefills):
            self.prefills.append(await self._add("prefill", number))
        for number in range(setting.num_decoders):
            self.decoders.append(await self._add("decode", number))
        await self.directory.refresh()
        adapters = GatewayAdapters(self.registry, self.directory.configs, options)
        if setting.adapts:
            await adapters.load(ADAPTER, str(self._models.adapter))
        explainer = Explainer(self.dispatcher, self.directory, router, Records())
        self._gateway = Gateway(
            self.directory,
            self.dispatcher,
            changes,
            request_metrics,
            options,
            explainer,
            adapters=adapters,
        )
        asked_over_http: Any = self
        self._service = InferenceService(asked_over_http)
        migration = Migration(self.directory, self.dispatcher, changes, options.reserve_timeout_s)
        self._moving = asyncio.create_task(migration.drain_workers())
        await self._until_connected()

    async def close(self) -> None:
        self.pause((*self.prefills, *self.decoders), every=0)
        self.go_on()
        await self.cancel_all()
        self._moving.cancel()
        await asyncio.wait([self._moving])
        await self.dispatcher.close()
        for worker in self._workers.values():
            worker.running.cancel()
        running = [worker.running for worker in self._workers.values()]
        await asyncio.wait(running)
        for stream in self._streams.values():
            await stream.close()
        for worker in self._workers.values():
            if worker.parts.swap_pool:
                worker.parts.swap_pool.close()
            if worker.parts.files:
                worker.parts.files.close()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    async def _add_pool(self, pool_id: str, num_blocks: int, version: str = "") -> None:
        """`version`: of its weights, as far as its fingerprint says."""
        setting, config = self.setting, self._models.of("prefill-0", 1)[0].config
        shape = (config.num_layers, 2, setting.block_size, config.num_kv_heads, config.head_dim)
        spec = await make_pool(self.store, num_blocks, setting.block_size, pool_id, version)
        stamps = make_stamps(self._directory / pool_id, spec)
        arena = torch.full((num_blocks, *shape), float("nan"), dtype=torch.bfloat16)
        if setting.kv_in_int8:
            arena = int8_kv.quantize(arena)
        stamps.check = partial(_check_finished, arena)
        self._pools[pool_id] = spec, stamps, arena

    async def _add(self, role: Role, number: int, pool_id: str = "pool") -> DeployedWorker:
        name, setting = f"{role}-{number}", self.setting
        spec, stamps, arena = self._pools[pool_id]
        membership = await join(self.store, spec, name, stamps)
        request_metrics = CollectorRegistry()
        metrics = WorkerMetrics(request_metrics)
        model, ops = self._models.of(name, setting.num_threads)
        forward = Watched(model, arena, setting.block_size, ops)
        forward.prompt = self._prompt
        swap_pool = await self._swap_pool(membership, metrics, ops)
        limits = Limits(
            max_num_seqs=128,
            max_num_batched_tokens=setting.chunk if setting.mix or role == "prefill" else 256,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=model.config.vocab_size,
        )
        device = setting.device(forward)
        parts = WorkerParts(
            self.store,
            membership,
            device,
            limits,
            metrics,
            swap_pool,
            files=self._files(name, stamps, arena, metrics),
            adapters=WorkerAdapters(model.whole_config, model.load_adapter, 1, 64),
            grammars=Grammars(
                self._models.directory, limits.vocab_size, model.config.eos_token_ids
            ),
            speculation=self._speculation(name, model, ops, arena) if role == "decode" else None,
        )
        return await self._serve(role, parts, forward, request_metrics)

    async def _serve(
        self,
        role: Role,
        parts: WorkerParts,
        forward: Watched,
        request_metrics: CollectorRegistry,
    ) -> DeployedWorker:
        mixes = self.setting.mix and role == "decode"
        worker = PoolWorker[Any](parts, ROLES[role], [Prefill] if mixes else [])
        running = asyncio.create_task(worker.run())
        found = DeployedWorker(worker, forward, parts, request_metrics, running)
        self._workers[worker.worker_id] = found
        await self._announce(worker, role, parts.limits.max_num_seqs)
        return found

    def _files(
        self, name: str, stamps: Any, arena: torch.Tensor, metrics: WorkerMetrics
    ) -> FileCache | None:
        if not self.setting.keeps_files:
            return None
        files = BlockFiles(self._directory / "cache", "fingerprint", name, 1 << 30, 1)
        return FileCache(files, stamps, lambda: HostBlocks(arena), metrics, compares_costs=False)

    async def _swap_pool(
        self, membership: Any, metrics: WorkerMetrics, ops: Any
    ) -> SwapPool | None:
        if "colder" not in self._pools:
            return None
        (_, _, arena), (spec, stamps, swap_arena) = self._pools["pool"], self._pools["colder"]
        return SwapPool(
            self.store,
            membership,
            await join(self.store, spec, membership.worker_id, stamps),
            partial(_copy, ops, arena, swap_arena),
            partial(_copy, ops, swap_arena, arena),
            metrics,
            compares_costs=False,
        )

    async def _announce(self, worker: Any, role: Role, max_num_seqs: int) -> None:
        member = Member(
            worker.worker_id,
            role,
            "nowhere:1",
            "serving",
            1,
            PROTOCOL_VERSION,
            worker.pool_id,
            MODEL,
            model_dir=str(self._models.directory),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            mix=self.setting.mix,
        )
        await self.registry.announce(member, ttl_s=1e6)

    def _speculation(
        self, name: str, model: Model, ops: Any, arena: torch.Tensor
    ) -> Speculation | None:
        if not self.setting.speculates:
            return None
        if not self.setting.has_draft_model:
            return oracle(self._next_known, 2, 2)
        is_late = self.setting.device is LateForward
        draft = draft_model(model, ops, arena, self.setting.block_size, is_late=is_late)
        self.draft_models[name] = draft
        return Speculation(draft if is_late else SometimesWrong(draft, 2), 2, AsMany())

    def _next_known(self, sequence: DecodingSequence, tokens: list[int]) -> int | None:
        """The next token of the compared request. Other requests get drafts that are hardly ever
        right."""
        rules = sequence.rules
        if rules.sampling.seed != SEED:
            return tokens[-1]
        number, answer = len(tokens) - rules.num_prompt_tokens, self.known.get(sequence.index, ())
        return answer[number] if number < len(answer) else None

    def _connect(self, member: Member) -> Stream:
        worker = self._workers[member.member_id].worker
        (role,) = (each for each in worker.roles if each.stream is stream_type(member.role))
        service = WorkerStream(worker, role=role)
        stream = Stream(member, service.Connect, self.dispatcher)
        self._streams[member.member_id, member.role] = stream
        return stream

    def streams(self, worker: DeployedWorker) -> list[Stream]:
        worker_id = worker.worker.worker_id
        return [stream for (found, _), stream in self._streams.items() if found == worker_id]

    def stream(self, worker: DeployedWorker) -> Stream:
        """The last stream to a worker."""
        return self.streams(worker)[-1]

    async def _until_connected(self) -> None:
        """Read the registry, and wait until the gateway is connected to all workers."""
        await self.directory.refresh()
        await self.until(lambda: all(worker.connected for worker in self.directory.workers))

    # ── clients ──────────────────────────────────────────────────────────────────────────────────

    def call(self, request: Request) -> Call:
        call = Call()
        call.reading = asyncio.create_task(self._read(call, request))
        self._calls.append(call)
        return call

    async def _read(self, call: Call, request: Request) -> None:
        asked = through_wire(messages.generate_request(request))
        no_deadline: Any = FakeContext()
        async for response in self._service.Generate(asked, no_deadline):
            call.deltas += messages.deltas(through_wire(response))

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Any]:
        return self._gateway.generate(replace(request, retain=self.retain))

    def explain(self, request_id: str) -> str:
        return "\n".join(self._gateway.explain(request_id, LOCAL_OPERATOR))

    async def ask(self, request: Request) -> Answer:
        return await self.call(request).answer()

    async def cancel_all(self) -> None:
        """Cancel the requests of all clients."""
        for call in self._calls:
            call.reading.cancel()
        await asyncio.gather(*(call.reading for call in self._calls), return_exceptions=True)
        self._calls.clear()

    async def until(self, holds: Callable[[], bool]) -> None:
        def nothing_failed_and_it_holds() -> bool:
            running = (worker.running for worker in self._workers.values())
            for task in (*running, *(call.reading for call in self._calls)):
                if task.done() and not task.cancelled():
                    task.result()
            return holds()

        await until(nothing_failed_and_it_holds, limit_s=LIMIT_S, longest_pause_s=0.001)

    async def until_empty(self) -> None:
        """Wait until no request holds or waits for blocks; then audit the ledgers."""
        for pool_id in self._pools:
            ledger = self.store.ledger(pool_id)
            await self.until(lambda ledger=ledger: not (ledger.holders or ledger.waiters))  # type: ignore[misc]
            assert (await self.store.audit(pool_id)).violations == ()
        for name, draft in self.draft_models.items():
            if not self._workers[name].running.done():
                await self.until(lambda draft=draft: draft.num_free_blocks == NUM_DRAFT_BLOCKS)  # type: ignore[misc]

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
        for worker in self._workers.values():
            for key, found in worker.forward.logits_of.items():
                whole[key] |= found
        return whole

    def pause(self, workers: Sequence[DeployedWorker], every: int) -> None:
        """Pause each time after `every` steps of the compared request; 0: no more."""
        for worker in workers:
            worker.forward.pause_every = every

    def go_on(self) -> None:
        for worker in self._workers.values():
            worker.forward.go_on()


def _check_finished(arena: torch.Tensor, block_id: int, token_ids: Sequence[int]) -> None:
    block = arena[block_id]
    values = int8_kv.scales(block) if block.dtype == torch.int8 else block
    assert values.isfinite().all(), "stamped before its KV is there"


def _copy(
    ops: Any, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    ops.copy_blocks(target, torch.tensor(pairs, dtype=torch.int64).view(-1, 2), source)
