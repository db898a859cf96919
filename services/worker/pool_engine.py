"""An engine on a pool: what a worker of any role works with."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockstore.store import BlockStore
from services.engine.batch import Fault
from services.engine.engine import Engine
from services.engine.forward import ForwardPass
from services.engine.messages import StepOutcome
from services.engine.scheduler import Scheduler
from services.engine.sequences.results import Advance
from services.engine.sequences.sequence import Rules
from services.engine.speculation.speculation import Speculation
from services.engine.thread import EngineThread
from services.model.structured.grammar import Grammar
from services.protocol.messages import Pooling
from services.protocol.ticket import Ticket
from services.runtime.errors import InvalidRequest
from services.runtime.logging import get_logger
from services.runtime.metrics import WorkerMetrics
from services.worker.adapters import WorkerAdapters
from services.worker.file_cache.file_cache import FileCache
from services.worker.grammars import Grammars
from services.worker.limits import Limits
from services.worker.membership import MappedPool
from services.worker.requests.holder_writes import HolderWrites
from services.worker.requests.store_writer import StoreWriter
from services.worker.step_meter import StepMeter
from services.worker.swap.pool import SwapPool

if TYPE_CHECKING:
    from services.runtime.tracing.tracer import Tracer

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker."""

    store: BlockStore
    membership: MappedPool
    forward: ForwardPass
    limits: Limits
    metrics: WorkerMetrics
    swap_pool: SwapPool | None = None
    files: FileCache | None = None
    """None if no blocks are kept in files."""
    tracer: "Tracer | None" = None
    """None if the worker reports no spans."""
    adapters: WorkerAdapters | None = None
    """None if the worker takes no requests for adapters."""
    grammars: Grammars | None = None
    """None if the worker takes no requests for structured output."""
    speculation: Speculation | None = None
    """None if rows get no drafts."""
    check_fence: Callable[[], None] = lambda: None
    """Raises WorkerFenced if the worker was fenced (`services.worker.liveness.fence_guard`)."""
    lacks_draft: bool = False
    """Whether decode needs a draft model that this worker, started for prefill, has not loaded."""


class PoolEngine:
    """The engine thread, and the ordered writes to the store about what it computes."""

    def __init__(
        self, parts: WorkerParts, on_advances: Callable[[Sequence[Advance]], None]
    ) -> None:
        """The event loop calls `on_advances` after each step."""
        self.store, self.limits, self.metrics = parts.store, parts.limits, parts.metrics
        self.swap_pool, self.files, self.tracer = parts.swap_pool, parts.files, parts.tracer
        self.adapters, self.grammars = parts.adapters, parts.grammars
        self.spec, self.stamps = parts.membership.spec, parts.membership.stamps
        self.worker_id, self.pool_id = parts.membership.worker_id, self.spec.pool_id
        self.draining = False
        self.step_meter = StepMeter()
        self.prompt_meter = StepMeter()
        """Measures the steps with prompts."""
        self.job_added = asyncio.Event()
        """Set when a request comes."""
        loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = loop.create_future()
        """Gets the first error of the engine, the store or a task: it is fatal."""
        self.writer = StoreWriter(self.fail)
        self.holders = HolderWrites(self.store, self.pool_id, self.writer)
        self._on_advances = on_advances
        self._tasks: set[asyncio.Task[None]] = set()
        engine = Engine(
            parts.forward,
            Scheduler(self.limits.max_num_batched_tokens, self.limits.max_num_seqs),
            self.stamps,
            look_ahead=self.limits.look_ahead,
            speculation=parts.speculation,
            check_fence=parts.check_fence,
        )
        self.engine = EngineThread(engine, loop, self._after_step, self.fail)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or the worker ends; its error is the worker's."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End all tasks, and then the engine thread."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.engine.stop)

    def _after_step(self, outcome: StepOutcome) -> None:
        for step in outcome.retired:
            self.metrics.step_s.observe(step.duration_s)
            self.metrics.step_tokens.observe(step.num_tokens)
            self.step_meter.add(step.duration_s, step.num_tokens)
            if step.has_prompts:
                self.prompt_meter.add(step.duration_s, step.num_tokens)
        try:
            self._on_advances(outcome.advances)
        except Exception as error:  # else the rest of the outcome would be lost silently
            self.fail(error)

    def rules(
        self, ticket: Ticket, prompt_logprobs: int | None = None, pooling: Pooling | None = None
    ) -> Rules:
        return Rules.of(
            ticket,
            self.spec.block_size,
            self.limits.eos_token_ids,
            self.limits.max_model_len,
            prompt_logprobs,
            self.grammar_of(ticket),
            self.adapters.get(ticket.adapter) if self.adapters and ticket.adapter else None,
            pooling,
            self.limits.score_head,
        )

    def grammar_of(self, ticket: Ticket) -> Grammar | None:
        structure = ticket.sampling.structure
        if structure is None:
            return None
        if self.grammars is None:
            raise InvalidRequest("this worker has no tokenizer for structured output")
        return self.grammars.get(structure)

    def check_ticket(self, ticket: Ticket, num_drawn: int = 1) -> None:
        """Raises InvalidRequest if this worker cannot compute a ticket: it is for another pool, the
        ticket or its sampling parameters name a token id beyond the vocabulary, or its tokens leave
        none to draw. Each sequence draws at least `num_drawn` tokens."""
        if ticket.pool_id != self.pool_id:
            raise InvalidRequest(f"this worker is on pool {self.pool_id}, not {ticket.pool_id}")
        prompt, generated = ticket.prompt_token_ids, [s.token_ids for s in ticket.sequences]
        finished = () if ticket.beams is None else (one.token_ids for one in ticket.beams.finished)
        if not generated:
            raise InvalidRequest("a ticket without sequences")
        named = max(ticket.sampling.named_token_ids(), default=0)
        tokens = filter(None, (prompt, *generated, *finished))
        if max(named, *map(max, tokens)) >= self.limits.vocab_size:
            raise InvalidRequest(f"token ids beyond the vocabulary of {self.limits.vocab_size}")
        if ticket.adapter is not None and self.adapters is None:
            raise InvalidRequest(f"this worker takes no adapters, so not {ticket.adapter.name}")
        if self.grammar_of(ticket) is not None and ticket.sampling.beam is not None:
            raise InvalidRequest("a beam search has no structured output")
        most = len(prompt) + ticket.sampling.max_tokens
        longest = min(most, self.limits.max_model_len) - num_drawn
        length = len(prompt) + max(map(len, generated))
        if length > longest:
            raise InvalidRequest(f"{length} tokens leave none to draw: at most {longest}")

    def retract(self, failed: Advance, fault: Fault) -> None:
        """Take all full blocks of a broken group out of the prefix index and the files: the cause
        may lie in one of them, and would break every request that adopts it. Nothing is broken if a
        grammar cannot go on."""
        if fault is Fault.GRAMMAR:
            log.warning("grammar_failed", holder_id=failed.key)
            return
        log.error("sequence_broken", holder_id=failed.key, reason=fault.value)
        self.metrics.num_broken.inc()
        self.holders.retract(failed.broken)
        if self.files is not None:
            self.files.drop(failed.broken)
