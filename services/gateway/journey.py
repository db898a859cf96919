"""The walk of one request through the workers, as one state machine.

          reserve()            start()                Prefilled
    QUEUED ───────▶ RESERVING ─────────▶ PREFILLING ────────────▶ DECODING
      ▲ ▲   refused    │                     │                        │
      │ └──────────────┘                     │                        │
      └──────────────────────────────────────┴────────────────────────┘
        given back (preempted, draining, stale ticket), or the worker was lost

    any ───▶ ENDED    finish reason, stop string, error, cancelled, deadline

Who may have something of the request at each stage, and is told to let go when it leaves:

    QUEUED nobody · RESERVING decode (a slot) · PREFILLING prefill (the blocks), decode (a slot)
    DECODING decode (the blocks), and until its first token prefill too (the ticket at rest)

Law 7: the tokens that the client has are the only truth. Every walk starts from prompt + tokens
received; what a worker of an earlier attempt says is dropped, and a ticket that does not continue
exactly what was received is refused.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from blockstore.store import PrefixHash
from services.common.errors import DeadlineExceeded, Overloaded, Unavailable
from services.common.logging import get_logger
from services.common.ticket import FinishReason, Ticket, TicketSequence, first_of
from services.gateway.admission import Admitted
from services.gateway.line import Place
from services.gateway.messages import (
    Admit,
    Failed,
    Generated,
    Malformed,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
    Submit,
)
from services.gateway.output import Output
from services.gateway.wire import error_of
from services.gateway.worker import Errand, Worker

log = get_logger(__name__)

MAX_SETBACKS = 3
"""How often a request is begun again after a worker was lost, or said what cannot be."""


class Stage(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


_NEXT = {
    Stage.QUEUED: {Stage.RESERVING, Stage.ENDED},
    Stage.RESERVING: {Stage.PREFILLING, Stage.QUEUED, Stage.ENDED},
    Stage.PREFILLING: {Stage.DECODING, Stage.QUEUED, Stage.ENDED},
    Stage.DECODING: {Stage.QUEUED, Stage.ENDED},
    Stage.ENDED: set[Stage](),
}


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request goes from its decode slot. `errand`: what there is to compute."""

    pool_id: str
    root_hash: PrefixHash
    prefill: Worker
    errand: Errand


class Desk(Protocol):
    """Whom a journey reports to."""

    def waits_again(self, journey: "Journey") -> None: ...

    def has_ended(self, journey: "Journey", error: Exception | None) -> None: ...


class Journey:
    """`place`: in line and in every ticket. `attempts`: numbers that this gateway never uses again,
    so that a client's next request of the same id is not taken for this one by a worker that has
    not let go of this one yet."""

    def __init__(
        self,
        request: Admitted,
        place: Place,
        output: Output,
        desk: Desk,
        attempts: Iterator[int],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.place = place
        self.output = output
        self.stage = Stage.QUEUED
        self.attempt = next(attempts)
        self.num_attempts = 1
        self.waiting_since = loop.time()
        self.started_at: float | None = None
        self._desk = desk
        self._attempts = attempts
        self._clock: Callable[[], float] = loop.time
        self._tokens: list[int] = []
        self._holder_id = ""
        self._pool_id = ""
        self._prefill: Worker | None = None
        self._decode: Worker | None = None
        self._answer: asyncio.Future[bool] | None = None
        self._num_setbacks = 0
        self._alarm = (
            None if request.deadline is None else loop.call_at(request.deadline, self._too_late)
        )

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Of the prompt and received so far."""
        return len(self.request.prompt_token_ids) + len(self._tokens)

    # ── what the dispatcher does with it ─────────────────────────────────────────────────────────

    async def reserve(self, decode: Worker, timeout_s: float) -> bool:
        """Ask a decode worker for a slot. False: refused, no answer, lost, or the request has ended
        meanwhile."""
        self._move(Stage.RESERVING)
        self._decode = decode
        decode.join(self)
        self._answer = answer = asyncio.get_running_loop().create_future()
        decode.send(Reserve(self.id, self.attempt))
        attempt = self.attempt
        await asyncio.wait([answer], timeout=timeout_s)
        if self.stage is not Stage.RESERVING or self.attempt != attempt:
            return False
        if not answer.done():  # it may still be granted, after we have turned away
            log.warning("reservation_unanswered", request_id=self.id, worker_id=decode.id)
            decode.unresponsive = True
            self._begin_again()
            return False
        if answer.result():
            return True
        decode.leave(self)
        decode.full = True
        self._decode = None
        self._move(Stage.QUEUED)
        return False

    def start(self, start: Start) -> None:
        """Send the ticket to prefill; a slot was granted."""
        self._move(Stage.PREFILLING)
        self._holder_id = f"{secrets.token_hex(16)}"
        self._pool_id = start.pool_id
        self._prefill = start.prefill
        self.started_at = self.started_at or self._clock()
        start.prefill.errands[self.id] = start.errand
        start.prefill.send(Submit(self._ticket(start.root_hash)))

    def give_up_slot(self) -> None:
        """Back to the queue with a slot that was granted, but that there is no use for."""
        self._begin_again()

    # ── what happens to it ───────────────────────────────────────────────────────────────────────

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        """Go on with what a worker says. Dropped: what is said about another attempt, by a worker
        that does not have the request, or at the wrong time."""
        if event.attempt != self.attempt:
            return
        match event:
            case Generated() if self.stage is Stage.DECODING and sender is self._decode:
                self._on_generated(sender, event)
            case Prefilled() if self.stage is Stage.PREFILLING and sender is self._prefill:
                self._on_prefilled(sender, event)
            case Reserved() if self.stage is Stage.RESERVING and sender is self._decode:
                self._resolve(event.granted)
            case Requeued() if sender in (self._prefill, self._decode):
                self._on_requeued(sender, event.reason)
            case Malformed() if sender in (self._prefill, self._decode):
                self._set_back(f"worker {sender.id} sent what makes no sense: {event.problem}")
            case Failed() if sender in (self._prefill, self._decode):
                self.end(error_of(event.code, event.message), told_by=sender)
            case _:
                log.debug("event_dropped", request_id=self.id, kind=type(event).__name__)

    def on_lost(self, worker: Worker) -> None:
        """A worker's stream broke: by contract it lets go of all that came over it."""
        if worker is self._decode:
            self._set_back(f"decode worker {worker.id} was lost")
        elif worker is self._prefill and self.stage is Stage.PREFILLING:
            self._set_back(f"prefill worker {worker.id} was lost")
        elif worker is self._prefill:  # the ticket may be claimed already; if not, decode says so
            self._prefill = None

    def end(self, error: Exception | None = None, told_by: Worker | None = None) -> None:
        """The end, for whatever reason; `told_by` has let go of it already. Again: no error."""
        if self.stage is Stage.ENDED:
            return
        self._let_go(told_by)
        self._move(Stage.ENDED)
        if self._alarm is not None:
            self._alarm.cancel()
        self.output.close(error)
        self._desk.has_ended(self, error)

    # ── the moves ────────────────────────────────────────────────────────────────────────────────

    def _on_prefilled(self, sender: Worker, event: Prefilled) -> None:
        problem = self._contradiction(event)
        if problem:
            self._set_back(f"prefill worker {sender.id} answered with a wrong ticket: {problem}")
            return
        sender.errands.pop(self.id, None)
        self.output.tally.saw_prefill(event.ticket.num_cached_tokens)
        if event.finish_reason is None:
            assert self._decode is not None
            self._move(Stage.DECODING)
            self._decode.send(Admit(replace(event.ticket, timeout_ms=self._timeout_ms())))
        self._deliver(event.ticket.sequences[0].token_ids[-1:], event.finish_reason, sender)

    def _on_generated(self, sender: Worker, event: Generated) -> None:
        num_left = self.request.sampling.max_tokens - len(self._tokens)
        if event.index != 0 or len(event.token_ids) > num_left:
            self._set_back(f"decode worker {sender.id} sent tokens that were not asked for")
            return
        if event.position != self.num_tokens:
            where = f"position {event.position} after {self.num_tokens} tokens"
            self._set_back(f"decode worker {sender.id} repeated or lost tokens: {where}")
            return
        self._prefill = None  # the ticket is claimed
        self._deliver(event.token_ids, event.finish_reason, sender)

    def _on_requeued(self, sender: Worker, reason: RequeueReason) -> None:
        if reason is RequeueReason.STALE_TICKET:
            self._set_back("its ticket was not there any more when it was claimed", sender)
            return
        if reason is RequeueReason.DRAINING:
            sender.draining = True
        else:
            self.output.tally.num_preemptions += 1
        self._begin_again(sender)

    def _deliver(
        self, token_ids: tuple[int, ...], finish: FinishReason | None, sender: Worker
    ) -> None:
        self._tokens.extend(token_ids)
        if self.output.write(token_ids, finish):
            self.end(told_by=sender if finish else None)
        elif self.output.overflowing:
            self.end(Overloaded("the client reads too slowly; its request was cancelled", 0.0))

    def _set_back(self, why: str, told_by: Worker | None = None) -> None:
        self._num_setbacks += 1
        log.warning("request_set_back", request_id=self.id, attempt=self.attempt, why=why)
        if self._num_setbacks > MAX_SETBACKS:
            self.end(Unavailable(f"given up after {self._num_setbacks} attempts: {why}"), told_by)
        else:
            self._begin_again(told_by)

    def _begin_again(self, told_by: Worker | None = None) -> None:
        """Back to the queue, at its place, with nothing but the tokens received."""
        self._let_go(told_by)
        self.attempt = next(self._attempts)
        self.num_attempts += 1
        self.waiting_since = self._clock()
        self._move(Stage.QUEUED)
        self._desk.waits_again(self)

    def _let_go(self, told_by: Worker | None) -> None:
        """Tell everyone who may have something of this attempt; `told_by` knows."""
        for worker in (self._prefill, self._decode):
            if worker is not None and worker is not told_by:
                worker.abort(self.id, self.attempt)
        if self._prefill is not None:
            self._prefill.errands.pop(self.id, None)
        if self._decode is not None:
            self._decode.leave(self)
        self._prefill = self._decode = None
        self._resolve(False)

    def _resolve(self, granted: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(granted)

    def _move(self, stage: Stage) -> None:
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"request {self.id}: {self.stage.value} cannot become {stage.value}")
        self.stage = stage

    def _too_late(self) -> None:
        self.end(DeadlineExceeded("the request's deadline has passed"))

    # ── tickets ──────────────────────────────────────────────────────────────────────────────────

    def _ticket(self, root_hash: PrefixHash) -> Ticket:
        return Ticket(
            request_id=self.id,
            attempt=self.attempt,
            order=self.place.order,
            pool_id=self._pool_id,
            holder_id=self._holder_id,
            holder_epoch=0,
            root_hash=root_hash,
            prompt_token_ids=self.request.prompt_token_ids,
            sampling=self.request.sampling,
            sequences=(TicketSequence(0, tuple(self._tokens)),),
            num_cached_tokens=self.output.tally.num_cached_tokens,
            timeout_ms=self._timeout_ms(),
        )

    def _timeout_ms(self) -> int:
        if self.request.deadline is None:
            return 0
        return max(1, round((self.request.deadline - self._clock()) * 1000))

    def _contradiction(self, event: Prefilled) -> str:
        """What is wrong with a ticket that came back: "" if it goes on exactly where we are."""
        ticket = event.ticket
        if (first_of(ticket.holder_id), ticket.pool_id) != (self._holder_id, self._pool_id):
            return "another holder or pool"
        if ticket.prompt_token_ids != self.request.prompt_token_ids:
            return "another prompt"
        if len(ticket.sequences) != 1 or ticket.sequences[0].index != 0:
            return "other sequences"
        sequence = ticket.sequences[0]
        if sequence.token_ids[:-1] != tuple(self._tokens) or not sequence.token_ids:
            return f"its tokens are not the {len(self._tokens)} received and one more"
        if event.finish_reason is None and not sequence.block_ids:
            return "no blocks"
        return ""
