"""An engine of one process: a pool in its own memory, and one worker that computes whole requests.

Admission and text are the gateway's, so a request means what it means to a service. Between
admission and text there are neither queues nor messages: a request submits its ticket to the
worker, which calls it with its tokens.
"""

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from blockstore.hashing import root_hash
from blockstore.memory_store import MemoryStore
from blockstore.records import PrefixHash
from quire.errors import ServerError
from services.engine.pool import KVPool
from services.engine.runner import Runner
from services.gateway.api import Embedded, EmbeddingRequest, GenerationRequest
from services.gateway.chat.admission import admit, check_priority, check_slots
from services.gateway.chat.embeddings import admit_embedding
from services.gateway.chat.outputs import open_output
from services.gateway.output.output import Output
from services.gateway.request.metrics import RequestMeters
from services.gateway.request.request import Request
from services.gateway.request.tickets import Tickets
from services.gateway.workers.directory import ModelPools
from services.gateway.workers.models.catalog import load_model
from services.gateway.workers.models.model_names import choose_model
from services.gateway.workers.pool import Pool
from services.model.checkpoint.adapter import AdapterFiles
from services.offline.role import Whole
from services.pool.allotment import WATERMARK
from services.pool.header import PoolHeader
from services.pool.memory import available_bytes
from services.pool.sizing import num_blocks_for
from services.pool.stamps import Stamps, record_bytes
from services.protocol.messages import Failed, Prefilled, Requeued, WorkerEvent
from services.protocol.ticket import Adapter, queue_order
from services.runtime.errors import InvalidRequest, StartupError
from services.runtime.metrics import WorkerMetrics
from services.runtime.rpc.error_table import error_of
from services.worker.adapters import WorkerAdapters
from services.worker.config import WorkerSettings
from services.worker.drafting import speculation
from services.worker.grammars import Grammars
from services.worker.loading import load
from services.worker.membership import MappedPool
from services.worker.pool_engine import PoolEngine, WorkerParts

T = TypeVar("T")


class OfflineSettings(WorkerSettings):
    """The settings come from the caller alone, not from the environment."""

    service: ClassVar[Literal["prefill", "decode"]] = "decode"
    num_expected_workers: int = 2
    """The default pool has the same size as under `quire serve` with a worker of each role."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def offline_settings(**values: Any) -> WorkerSettings:
    """Check the settings. Raises StartupError."""
    try:
        return OfflineSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        raise StartupError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from error


class OfflineEngine:
    """Generates like a gateway (`services.gateway.api.Generator`)."""

    def __init__(self, settings: WorkerSettings, loop: asyncio.AbstractEventLoop) -> None:
        """Load the model. Blocks. `loop` runs the engine: it alone may call the coroutines. Raises
        StartupError."""
        if settings.device != "cpu":
            raise StartupError(
                f"device {settings.device}: a pool on a GPU needs a block manager: `quire serve`"
            )
        if settings.cache_directory is not None:
            raise StartupError("cache_directory: only `quire serve` keeps blocks in files")
        self._settings, self._store = settings, MemoryStore()
        loaded = load(settings, progress=lambda: None)
        model, layout, limits = loaded.model, loaded.layout, loaded.limits
        block_bytes = layout.block_bytes + record_bytes(layout.block_size)
        available = available_bytes(Path("/dev/shm"))  # as for the pool of a service
        num_blocks = num_blocks_for(loaded.plan, block_bytes, available)
        pool = KVPool.private(layout, num_blocks, "cpu")
        stamps = Stamps(None, num_blocks, layout.block_size)
        header = PoolHeader("offline", "", layout, num_blocks, int(WATERMARK * num_blocks))
        own = MappedPool(self._store, header, "offline", pool, stamps)
        self.spec = own.spec
        pools = (Pool(self.spec, prefill=(), decode=()),)
        self._served = ModelPools(load_model(str(settings.model)), limits.max_model_len, pools)
        runner = Runner(model, pool.kv, layout.block_size, loaded.ops)
        runner.warm_up(max_tokens=32, max_rows=limits.max_num_seqs)
        max_loras, max_rank = settings.max_loras, settings.max_lora_rank
        parts = WorkerParts(
            self._store,
            own,
            runner,
            limits,
            WorkerMetrics(CollectorRegistry()),
            adapters=WorkerAdapters(model.whole_config, model.load_adapter, max_loras, max_rank),
            grammars=Grammars(settings.model, limits.vocab_size, limits.eos_token_ids),
            speculation=speculation(settings, loaded.draft, runner, lambda draft: draft.launch),
        )
        self._known_adapters: dict[str, Adapter] = {}
        self._meter = RequestMeters(CollectorRegistry()).meter(layout.model)
        self._secret = os.urandom(32)
        self._arrivals = itertools.count(time.time_ns() // 1_000_000)
        self._work: asyncio.Future[Any] | None = None
        loop.run_until_complete(self._start(parts))

    async def _start(self, parts: WorkerParts) -> None:
        self._worker = worker = PoolEngine(parts, lambda advances: self.role.on_advances(advances))
        self.role = Whole(worker)
        await self._store.register_pool(self.spec)
        await self._store.register_worker(
            self.spec,
            worker.worker_id,
            mark_owned=lambda holder, block_ids: worker.stamps.mark_owned(block_ids, holder),
        )
        worker.engine.start()
        for work in (worker.writer.run(), *self.role.loops()):
            worker.start(work)

    async def close(self) -> None:
        await self._worker.stop()
        del self._worker, self.role  # with the model and the pool
        await asyncio.get_running_loop().shutdown_default_executor()

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which generates. Raises ServerError if the worker has failed."""
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._work, failure = task, self._worker.failure
        await asyncio.wait([task, failure], return_when=asyncio.FIRST_COMPLETED)
        if not failure.done():
            return cast("T", task.result())
        task.cancel()
        await asyncio.wait([task])
        raise ServerError(f"the engine has ended: {failure.exception()!r}", "closed")

    def cancel(self) -> None:
        """Cancel the work that `drive` awaits."""
        if self._work is not None:
            self._work.cancel()

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        """See `Generator.generate`."""
        check_priority(request.priority, client_priority=True)
        adapter, name = self._known_adapters.get(request.model), self.spec.model
        if adapter is None:
            choose_model(request.model, {name: name}, adapters=[*self._known_adapters])
        request_id = request.request_id or f"gen-{secrets.token_hex(12)}"
        arrived_at = asyncio.get_running_loop().time()
        admitted = await admit(request, request_id, name, self._served, adapter)
        check_slots(admitted.sampling.width, self._settings.num_seqs)
        with self._running(admitted, arrived_at) as output:
            yield output

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """See `Generator.embed`."""
        request_id, arrived_at = f"gen-{secrets.token_hex(12)}", asyncio.get_running_loop().time()
        admitted = await admit_embedding(request, request_id, self.spec.model, self._served)
        with self._running(admitted, arrived_at) as output:
            async for _ in output:
                pass
        return Embedded(request_id, admitted.embedding, output.stats.usage())

    @property
    def is_cross_encoder(self) -> bool:
        return self._served.model.config.is_cross_encoder

    @contextmanager
    def _running(self, request: Request, arrived_at: float) -> Iterator[Output]:
        """Runs a request at the worker until the block is left."""
        model, meter = self._served.model, self._meter
        open_output(request, model, arrived_at, meter=meter, rests=None, reports_cached=True)
        digest, arrival = request.adapter.digest if request.adapter else "", next(self._arrivals)
        root = root_hash(self.spec.fingerprint, self._secret, request.cache_salt, digest)
        tickets = Tickets(request, queue_order(request.asked.priority, arrival))
        running = _Request(request, tickets, (self.spec.pool_id, root), self.role)
        running.submit()
        try:
            yield request.output
        finally:
            running.abort()

    async def add_adapter(self, name: str, directory: str) -> None:
        """Let requests name a LoRA adapter as their model. Raises InvalidRequest."""
        if not self._settings.max_loras:
            raise InvalidRequest("this LLM takes no adapters: max_loras is 0")
        self._known_adapters[name] = await asyncio.to_thread(self._adapter, name, directory)

    def _adapter(self, name: str, directory: str) -> Adapter:
        path = Path(directory).expanduser().absolute()
        config, rank = self._served.model.config, self._settings.max_lora_rank
        return Adapter(name, str(path), AdapterFiles.read(path, config, rank).digest)


class _Request:
    """A request that runs: what the worker calls with its events (`events.Session`)."""

    def __init__(
        self, request: Request, tickets: Tickets, home: tuple[str, PrefixHash], role: Whole
    ) -> None:
        """`home` has the pool and the root hash of its tickets."""
        self._request, self._tickets, self._home, self._role = request, tickets, home, role
        self._output = request.output
        self._attempts, self._key = itertools.count(), ("", 0)

    def submit(self) -> None:
        """Submit the request with the tokens that it has."""
        request = self._request
        ticket = self._tickets.submit(next(self._attempts), *self._home, None)
        self._key = ticket.key
        self._role.submit(self, ticket, request.unsent_prompt_logprobs, request.pooling)

    def abort(self) -> None:
        """End the request at the worker. No error if it has ended."""
        self._role.abort(self, *self._key)

    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        match event:
            case Prefilled():
                self._write(event)
            case Requeued(ticket=progress):
                self._output.stats.num_preemptions += 1
                self._tickets.note(progress)
                self.submit()
            case Failed(code=code, message=message):
                self._output.close(error_of(code, message))
        if then is not None:
            then()

    def finish(self) -> None:
        """Do nothing: there is no stream to close."""

    def _write(self, event: Prefilled) -> None:
        output = self._output
        output.stats.note_prefill(event.ticket.num_cached_tokens)
        if event.prompt_logprobs:
            output.write_prompt(event.prompt_logprobs)
        for one in event.outputs:
            if not output.is_over(one.index):
                output.write(one)
                if output.is_over(one.index) and one.finish_reason is None:
                    self._role.abort(self, *self._key, one.index)  # a stop string ended it
        self._request.embedding = event.embedding
        if event.embedding or output.has_ended:
            output.close(None)
