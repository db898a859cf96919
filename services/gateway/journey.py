"""The walk of one request through the workers, as one state machine.

          reserve()            start()                Prefilled                move()
    QUEUED ───────▶ RESERVING ─────────▶ PREFILLING ────────────▶ DECODING ◀──────────┐
      ▲ ▲   refused  │ │                     │                     ▲  │ │ handed over │
      │ └────────────┘ │ go_on()             │                     │  │ └─────────────┘
      │                └─────────────────────┼─────────────────────┘  │
      └──────────────────────────────────────┴────────────────────────┘
        given back (preempted, draining, stale ticket), or the worker was lost

    any ───▶ ENDED    finish reason, stop string, error, cancelled, deadline

Who may have something of the request at each stage, and is told to let go when it leaves:

    QUEUED nobody · RESERVING decode (a slot) · PREFILLING prefill (the blocks), decode (a slot)
    DECODING decode (the blocks); while it moves, the next decode worker (a slot)

and in any of them but PREFILLING the issuer of a ticket at rest (the blocks): until the first token
of the decode worker that it was sent to, which has claimed it then.

Law 7: the tokens that the client has are the only truth. Every walk starts from prompt + tokens
received; what a worker of an earlier attempt says is dropped, and a ticket that does not continue
exactly what was received is refused.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from blockstore.store import PrefixHash
from services.common.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    Overloaded,
    PoisonRequest,
    Unavailable,
)
from services.common.logging import get_logger
from services.common.ticket import FinishReason, Swapped, Ticket, TicketSequence, first_of
from services.gateway.admission import Admitted
from services.gateway.continuity import discontinuity
from services.gateway.custody import Custody
from services.gateway.line import Place
from services.gateway.messages import (
    Admit,
    Failed,
    Generated,
    HandOver,
    Malformed,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserved,
    Submit,
)
from services.gateway.output import Output
from services.gateway.pause import Pause
from services.gateway.slot import AtRest, Slot, Told
from services.gateway.wire import error_of
from services.gateway.worker import Errand, Worker

log = get_logger(__name__)

MAX_SETBACKS = 3
"""How often in a row, without a token, a request is begun again because a worker was lost before
it had the request (`services.gateway.custody` has the others), or said what cannot be."""


class Stage(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


_NEXT = {
    Stage.QUEUED: {Stage.RESERVING, Stage.ENDED},
    Stage.RESERVING: {Stage.PREFILLING, Stage.DECODING, Stage.QUEUED, Stage.ENDED},
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
        read_window_s: float = 10.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.place = place
        self.output = output
        self.stage = Stage.QUEUED
        self.attempt = next(attempts)
        self.num_attempts = 1
        self.at_rest: AtRest | None = None
        self.waiting_since = loop.time()
        self.started_at: float | None = None
        self.moved_at = -math.inf
        self._desk = desk
        self._attempts = attempts
        self._clock: Callable[[], float] = loop.time
        self._tokens = list(request.received or ())
        self._submitted: Ticket | None = None
        self._prefill: Worker | None = None
        self._slot: Slot | None = None
        self._next: Slot | None = None
        self._num_setbacks = 0
        self._custody = Custody()
        self._alarm: asyncio.TimerHandle | None = None
        self._set_alarm()
        self._pause = Pause(read_window_s, self._not_read)
        output.on_read = self._on_read

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def _decode(self) -> Worker | None:
        return self._slot.worker if self._slot is not None else None

    @property
    def _swapped(self) -> Swapped | None:
        return None if self.at_rest is None else self.at_rest.ticket.swapped

    @property
    def can_go_on(self) -> bool:
        """Whether a decode worker can claim its ticket at rest as it is."""
        return self.at_rest is not None and self._swapped is None

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV a prefill worker does not find in the colder pool."""
        return self.num_tokens - (self._swapped.num_computed_tokens if self._swapped else 0)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and received so far."""
        return len(self.request.prompt_token_ids) + len(self._tokens)

    # ── its client ───────────────────────────────────────────────────────────────────────────────

    def resume(self, request: Admitted, output: Output) -> None:
        """Go on for a client that lost its stream: `output` gets what it has not received, and its
        deadline holds. DuplicateRequest: that is another request."""
        received = request.received or ()
        num_received = len(received)
        so_far = tuple(self._tokens[:num_received])
        if not request.continues(self.request) or so_far != received:
            raise DuplicateRequest(f"another request with id {self.id!r} is running")
        self.output.close(DuplicateRequest("another call goes on with this request"))
        self.request, self.output = request, output
        output.on_read = self._on_read
        self._on_read()
        self._set_alarm()
        if output.write(tuple(self._tokens[num_received:]), None):
            self.end()

    def adopt(self, found: AtRest) -> None:
        """Go on with what another gateway had: its place in line, its ticket, and the tokens that
        the client has not got. It may end with them."""
        ticket = found.ticket
        self._submitted = replace(ticket, holder_id=first_of(ticket.holder_id))
        self.place = Place.of(ticket.order)
        self.started_at = self._clock()
        token_ids = ticket.sequences[0].token_ids
        num_new = len(token_ids) - len(self._tokens)
        self.at_rest = found
        if problem := self._problem(ticket, num_new, blocks=True):
            log.warning("parked_ticket_refused", request_id=self.id, reason=problem)
            self.give_up_ticket()
        elif num_new:
            self._deliver(token_ids[-num_new:], None, found.issuer)

    def leave(self, output: Output) -> None:
        """Whoever reads `output` is gone, and with it the request, unless another goes on."""
        if output is self.output:
            self.end()

    @property
    def paused(self) -> bool:
        """Its client has not read what there is: it stands in no line."""
        return self._pause.is_on

    def _rest(self) -> None:
        """Come to rest until the client has read on. Again for every attempt that goes on."""
        self._pause.begin()
        worker = self.settled_at
        if worker is not None and self._pause.is_news(self.attempt):
            worker.send(HandOver(self.id, self.attempt))

    def _on_read(self) -> None:
        if self._pause.is_on:
            self._pause.end()
            if self.stage is Stage.QUEUED:
                self._desk.waits_again(self)

    def _not_read(self) -> None:
        self.end(Overloaded("the client reads too slowly; its request was cancelled", 0.0))

    # ── what the dispatcher does with it ─────────────────────────────────────────────────────────

    async def reserve(self, decode: Worker, timeout_s: float) -> bool:
        """Ask a decode worker for a slot. False: refused, no answer, lost, or the request has ended
        meanwhile."""
        self._move(Stage.RESERVING)
        slot = self._slot = Slot(decode, self, self.id, self.attempt)
        await slot.answered(timeout_s)
        if self._slot is not slot:
            return False
        if slot.refused:
            slot.let_go()
            self._slot = None
            self._move(Stage.QUEUED)
        elif not slot.granted:
            self._begin_again()
        return slot.granted

    def start(self, start: Start) -> None:
        """Send the ticket to prefill; a slot was granted."""
        self._move(Stage.PREFILLING)
        self._submitted = self._ticket(start)
        self._prefill = start.prefill
        self.started_at = self.started_at or self._clock()
        start.prefill.errands[self.id] = start.errand
        submit = Submit(self._submitted)
        self._custody.hand_to(start.prefill, lambda: start.prefill.send(submit))

    def go_on(self) -> None:
        """Send the ticket at rest to the decode worker whose slot was granted."""
        self._move(Stage.DECODING)
        self._admit()

    def give_up_ticket(self, told: Told | None = None) -> None:
        """Nobody goes on with the ticket at rest: its issuer lets go, and all is computed again."""
        rest, self.at_rest = self.at_rest, None
        if rest is not None and rest.key != told:
            rest.issuer.abort(self.id, rest.ticket.attempt)

    def give_up_slot(self) -> None:
        """Back to the queue with a slot that was granted, but that there is no use for."""
        self._begin_again()

    # ── from one decode worker to another ────────────────────────────────────────────────────────

    @property
    def settled_at(self) -> Worker | None:
        """The decode worker that runs it and has claimed its ticket; None while there is none, or
        while it moves."""
        settled = self.stage is Stage.DECODING and self.at_rest is None and self._next is None
        return self._decode if settled else None

    async def move(self, target: Worker, timeout_s: float) -> bool:
        """Go on at another decode worker of the same pool, with nothing computed again. It runs on
        where it is until a slot is granted there. False: refused, no answer, or over meanwhile.
        Only for who is settled."""
        assert self._slot is not None
        slot = self._next = Slot(target, self, self.id, next(self._attempts))
        await slot.answered(timeout_s)
        if self._next is not slot:
            return False
        if slot.granted:
            self._slot.worker.send(HandOver(self.id, self.attempt))
        else:
            self._stay()
        return slot.granted

    def _stay(self, told: Told | None = None) -> None:
        """It does not move any more."""
        slot, self._next = self._next, None
        if slot is not None:
            slot.let_go(told)

    # ── what happens to it ───────────────────────────────────────────────────────────────────────

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        """Go on with what a worker says. Dropped: what is said about another attempt, by a worker
        that does not have the request, or at the wrong time."""
        if event.attempt != self.attempt:
            self._on_other_attempt(sender, event)
            return
        match event:
            case Generated() if self.stage is Stage.DECODING and sender is self._decode:
                self._on_generated(sender, event)
            case Prefilled() if self.stage is Stage.PREFILLING and sender is self._prefill:
                self._on_prefilled(sender, event)
            case Reserved() if self._slot and sender is self._slot.worker:
                self._slot.answer(event.granted)
            case Requeued(ticket=Ticket(swapped=Swapped()) as ticket) if sender is self._decode:
                self._on_swapped_out(sender, ticket)
            case Requeued(ticket=Ticket() as ticket) if sender is self._decode:
                self._on_handed_over(sender, ticket)
            case Requeued(ticket=None) if sender in self._holding:
                self._on_requeued(sender, event)
            case Malformed() if sender in self._holding:
                self._set_back(f"worker {sender.id} sent what makes no sense: {event.problem}")
            case Failed() if sender in self._holding:
                self.end(error_of(event.code, event.message), (sender, event.attempt))
            case _:
                log.debug("event_dropped", request_id=self.id, kind=type(event).__name__)

    @property
    def _holding(self) -> tuple[Worker | None, ...]:
        """Who may speak for the attempt of now."""
        issuer = None
        if self.at_rest is not None and self.at_rest.ticket.attempt == self.attempt:
            issuer = self.at_rest.issuer
        return self._prefill, self._decode, issuer

    def _on_other_attempt(self, sender: Worker, event: RequestEvent) -> None:
        """Of where it moves to, or of who keeps its ticket; anything else is old."""
        told = sender, event.attempt
        match event:
            case Reserved() if self._next and told == self._next.key:
                self._next.answer(event.granted)
            case Requeued() | Failed() if self.at_rest and told == self.at_rest.key:
                self._on_ticket_lost(told)
            case _:
                log.debug("event_dropped", request_id=self.id, kind=type(event).__name__)

    def _on_ticket_lost(self, told: Told) -> None:
        """The issuer has taken the ticket back: who had it in hand begins again, who waits in line
        stays there."""
        if self.stage is Stage.DECODING:
            self._begin_again(told)
        else:
            self.at_rest = None

    def on_lost(self, worker: Worker) -> None:
        """A worker's stream broke: by contract it lets go of all that came over it."""
        if self.at_rest is not None and worker is self.at_rest.issuer:
            self.at_rest = None  # it may be claimed already; if not, the decode worker says so
        if self._next is not None and worker is self._next.worker:
            self._stay()
        role = worker.member.role
        if self._custody.convicted_by(worker):
            self.end(
                PoisonRequest(f"this request cannot be computed: its {role} worker died twice")
            )
        elif worker in (self._decode, self._prefill):
            self._set_back(f"{role} worker {worker.id} was lost")

    def end(self, error: Exception | None = None, told: Told | None = None) -> None:
        """The end, for whatever reason. Again: no error."""
        if self.stage is not Stage.ENDED:
            self._let_go(told)
            self.strand(error)

    def strand(self, error: Exception | None) -> None:
        """The end here, with nobody told: our streams to the workers break next, and what they run
        is parked for the gateway at which its client goes on. Again: no error."""
        if self.stage is Stage.ENDED:
            return
        self._move(Stage.ENDED)
        if self._alarm is not None:
            self._alarm.cancel()
        self._pause.end()
        self.output.close(error)
        self._desk.has_ended(self, error)

    # ── the moves ────────────────────────────────────────────────────────────────────────────────

    def _on_prefilled(self, sender: Worker, event: Prefilled) -> None:
        finish = event.finish_reason
        problem = self._problem(event.ticket, num_new=1, blocks=finish is None)
        if problem:
            self._set_back(f"prefill worker {sender.id} answered with a wrong ticket: {problem}")
            return
        self._custody.got_token(sender)
        sender.errands.pop(self.id, None)
        self.output.tally.saw_prefill(event.ticket.num_cached_tokens)
        if finish is None:
            self.give_up_ticket()  # one that was swapped out is of no use any more
            self._prefill = None
            self.at_rest = AtRest(event.ticket, sender)
            self.go_on()
        self._deliver(event.ticket.sequences[0].token_ids[-1:], finish, sender)

    def _on_handed_over(self, sender: Worker, ticket: Ticket) -> None:
        """What ran is at rest: it goes on where a slot is kept for it, or waits for one in line."""
        problem = self._problem(ticket, num_new=0, blocks=True)
        if problem or self.stage is not Stage.DECODING:
            why = problem or "it was not at work"
            self._set_back(f"decode worker {sender.id} handed over a wrong ticket: {why}")
            return
        self.at_rest = AtRest(ticket, sender)
        slot, self._slot = self._slot, None
        assert slot is not None
        slot.let_go(told=slot.key)
        if self._next is None or not self._next.granted:
            self._wait_again()
            return
        self._slot, self._next = self._next, None
        self.moved_at = self._clock()
        self.output.tally.num_moves += 1
        self.attempt = self._slot.attempt
        self._admit()

    def _on_swapped_out(self, sender: Worker, ticket: Ticket) -> None:
        """It gave way, and its blocks were copied: a prefill worker will bring them back."""
        problem = self._problem(ticket, num_new=0, blocks=False)
        if problem:
            self._set_back(f"decode worker {sender.id} swapped out a wrong ticket: {problem}")
            return
        self.output.tally.num_preemptions += 1
        self.at_rest = AtRest(ticket, sender)
        self._wait_again(told=self.at_rest.key)

    def _admit(self) -> None:
        """The ticket at rest goes to the worker where we have a slot."""
        assert self._slot is not None
        self._custody.hand_to(self._slot.worker, self._send_ticket)

    def _send_ticket(self) -> None:
        if self.at_rest is None or self._slot is None:  # its issuer was lost before its turn came
            self._set_back("its ticket was lost before it was claimed")
            return
        ticket = replace(
            self.at_rest.ticket,
            attempt=self.attempt,
            order=self.place.order,
            timeout_ms=self._timeout_ms(),
        )
        self._slot.worker.send(Admit(ticket))

    def _on_generated(self, sender: Worker, event: Generated) -> None:
        num_left = self.request.sampling.max_tokens - len(self._tokens)
        if event.index != 0 or len(event.token_ids) > num_left:
            self._set_back(f"decode worker {sender.id} sent tokens that were not asked for")
            return
        if event.position != self.num_tokens:
            where = f"position {event.position} after {self.num_tokens} tokens"
            self._set_back(f"decode worker {sender.id} repeated or lost tokens: {where}")
            return
        self._custody.got_token(sender)
        self.at_rest = None  # the ticket is claimed
        self._deliver(event.token_ids, event.finish_reason, sender)

    def _on_requeued(self, sender: Worker, event: Requeued) -> None:
        told = sender, event.attempt
        if event.reason is RequeueReason.STALE_TICKET:
            self._set_back("its ticket was not there any more when it was claimed", told)
            return
        if event.reason is RequeueReason.DRAINING:
            sender.draining = True
        else:
            self.output.tally.num_preemptions += 1
        self._begin_again(told)

    def _deliver(
        self, token_ids: tuple[int, ...], finish: FinishReason | None, sender: Worker
    ) -> None:
        self._tokens.extend(token_ids)
        self._num_setbacks = 0
        if self.output.write(token_ids, finish):
            self.end(told=(sender, self.attempt) if finish else None)
        elif self.output.overflowing:
            self._not_read()
        elif self.output.congested:
            self._rest()

    def _set_back(self, why: str, told: Told | None = None) -> None:
        self._num_setbacks += 1
        log.warning("request_set_back", request_id=self.id, attempt=self.attempt, why=why)
        if self._num_setbacks > MAX_SETBACKS:
            self.end(Unavailable(f"given up after {self._num_setbacks} attempts: {why}"), told)
        else:
            self._begin_again(told)

    def _begin_again(self, told: Told | None = None) -> None:
        """Back to the queue, with nothing but the tokens received; and a ticket at rest, as long as
        nobody was asked to claim it. (Of one that was swapped out a prefill worker finds out by
        itself whether it is still there.)"""
        if self.stage is Stage.DECODING:
            self.give_up_ticket(told)
        self._wait_again(told)

    def _wait_again(self, told: Told | None = None) -> None:
        """Back to the queue, at its place."""
        self._let_go_of_slots(told)
        self.attempt = next(self._attempts)
        self.num_attempts += 1
        self.waiting_since = self._clock()
        self._move(Stage.QUEUED)
        self._desk.waits_again(self)

    def _let_go(self, told: Told | None) -> None:
        """Tell everyone who may have something of this request; `told` knows."""
        self.give_up_ticket(told)
        self._let_go_of_slots(told)

    def _let_go_of_slots(self, told: Told | None) -> None:
        self._custody.take_back()
        self._stay(told)
        if self._prefill is not None:
            if (self._prefill, self.attempt) != told:
                self._prefill.abort(self.id, self.attempt)
            self._prefill.errands.pop(self.id, None)
        if self._slot is not None:
            self._slot.let_go(told)
        self._prefill = self._slot = None

    def _move(self, stage: Stage) -> None:
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(f"request {self.id}: {self.stage.value} cannot become {stage.value}")
        self.stage = stage

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        deadline, loop = self.request.deadline, asyncio.get_running_loop()
        self._alarm = None if deadline is None else loop.call_at(deadline, self._too_late)

    def _too_late(self) -> None:
        self.end(DeadlineExceeded("the request's deadline has passed"))

    # ── tickets ──────────────────────────────────────────────────────────────────────────────────

    def _ticket(self, start: Start) -> Ticket:
        return Ticket(
            request_id=self.id,
            attempt=self.attempt,
            order=self.place.order,
            pool_id=start.pool_id,
            holder_id=secrets.token_hex(16),
            holder_epoch=0,
            root_hash=start.root_hash,
            prompt_token_ids=self.request.prompt_token_ids,
            sampling=self.request.sampling,
            sequences=(TicketSequence(0, tuple(self._tokens)),),
            num_cached_tokens=self.output.tally.num_cached_tokens,
            timeout_ms=self._timeout_ms(),
            swapped=self._swapped,
        )

    def _timeout_ms(self) -> int:
        if self.request.deadline is None:
            return 0
        return max(1, round((self.request.deadline - self._clock()) * 1000))

    def _problem(self, ticket: Ticket, num_new: int, blocks: bool) -> str:
        """What is wrong with a ticket that came back: "" if it goes on exactly where we are."""
        assert self._submitted is not None
        if blocks and not all(sequence.block_ids for sequence in ticket.sequences):
            return "no blocks"
        return discontinuity(ticket, self._submitted, tuple(self._tokens), num_new)
