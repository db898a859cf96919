"""The walk of one request through the workers: its stages are in `services.gateway.request.status`.

What it has at workers at each stage, and lets go of when it leaves, is in
`services.gateway.request.leases`; whom it walks for, and what has been received, in
`services.gateway.streaming.client`.

Law 7: the tokens that the client has are the only truth. Every walk starts from prompt + tokens
received; what a worker of an earlier attempt says is dropped, and a ticket that does not continue
exactly what was received is refused.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from blockstore.records import PrefixHash
from services.common.errors import InvalidRequest, Unavailable
from services.common.runtime.logging import get_logger
from services.gateway.intake.admission import Admitted
from services.gateway.intake.identity import client_id
from services.gateway.request.beam_tickets import BeamTickets
from services.gateway.request.leases import Entrusted, Leases
from services.gateway.request.status import RequestStatus
from services.gateway.request.tickets import Tickets
from services.gateway.scheduling.decode_reservation import DecodeReservation, Told
from services.gateway.scheduling.request_queue import QueuePosition
from services.gateway.streaming.client import Client
from services.gateway.streaming.output import Output
from services.gateway.workers.messages import (
    Admit,
    Began,
    Failed,
    Generated,
    Malformed,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserved,
    Submit,
)
from services.gateway.workers.wire import error_of
from services.gateway.workers.worker import PrefillLoad, Worker
from services.protocol.ticket import Swapped, Ticket

log = get_logger(__name__)

MAX_SETBACKS = 3
"""How often in a row, without a token, a request is begun again because a worker was lost before
it had the request (`services.gateway.request.crash_attribution` has the others), or said what
cannot be."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request goes from its decode slot. `prefill_load`: what there is to compute."""

    pool_id: str
    root_hash: PrefixHash
    prefill: Worker
    prefill_load: PrefillLoad


class LifecycleHost(Protocol):
    """Whom a journey reports to."""

    def waits_again(self, lifecycle: "RequestLifecycle") -> None: ...

    def has_ended(self, lifecycle: "RequestLifecycle", error: Exception | None) -> None: ...


class RequestLifecycle:
    """`attempts`: numbers that this gateway never uses again, so that a client's next request of
    the same id is not taken for this one by a worker that has not let go of this one yet."""

    def __init__(
        self,
        request: Admitted,
        position: QueuePosition,
        output: Output,
        host: LifecycleHost,
        attempts: Iterator[int],
        read_window_s: float = 10.0,
    ) -> None:
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self.id = request.request_id
        self.status = RequestStatus.QUEUED
        self.attempt = next(attempts)
        self.num_attempts = 1
        self.waiting_since = self._clock()
        self.started_at: float | None = None
        self.moved_at = -math.inf
        self.client = Client(request, output, read_window_s, self._on_read, self.end)
        kind_of_tickets = BeamTickets if request.sampling.beam else Tickets
        self._tickets = kind_of_tickets(self.client, position)
        self._leases = Leases()
        self._host = host
        self._attempts = attempts
        self._num_setbacks = 0

    @property
    def position(self) -> QueuePosition:
        """In line, and in every ticket."""
        return self._tickets.position

    @property
    def num_sequences(self) -> int:
        """That go on: it takes a slot for each. A search goes on with all its beams to its end."""
        num_living, request = len(self.client.living), self.client.request
        return request.width if num_living and request.sampling.beam else num_living

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV a prefill worker does not find in the colder pool: there it has all but
        the last of each sequence."""
        return self.num_sequences if self._leases.swapped else self.client.num_tokens

    @property
    def at_rest(self) -> Entrusted | None:
        """Its ticket that nobody has claimed yet."""
        return self._leases.at_rest

    @property
    def can_go_on(self) -> bool:
        """Whether a decode worker can claim its ticket at rest as it is."""
        return self.at_rest is not None and self.at_rest.ticket.swapped is None

    @property
    def settled_at(self) -> Worker | None:
        """The decode worker that runs it and has claimed its ticket; None while there is none, or
        while it moves."""
        leases = self._leases
        settled = (
            self.status is RequestStatus.DECODING and leases.at_rest is None and leases.next is None
        )
        return leases.decode if settled else None

    # ── its client ───────────────────────────────────────────────────────────────────────────────

    def resume(self, request: Admitted, output: Output) -> None:
        """Go on for a client that lost its stream. DuplicateRequest: that is another request."""
        if self.client.resume(request, output):
            self._rewind()
        elif output.has_ended:
            self.end()

    def _rewind(self) -> None:
        """What runs, or is at rest, is ahead of what the client is to get next."""
        self._leases.let_go_of_ticket()
        if self.status is not RequestStatus.QUEUED:
            self._wait_again()

    def adopt(self, found: Entrusted) -> None:
        """Go on with what another gateway had: its place in line, its ticket, and the tokens that
        the client has not got. It may end with them."""
        ticket = found.ticket
        gained = self._tickets.adopt(ticket)
        self.started_at = self._clock()
        self._leases.at_rest = found
        if gained and self.client.wants_logprobs:
            self.give_up_ticket()  # nobody has those of its new tokens: they are drawn again
        elif problem := self._tickets.problem(ticket, gained):
            log.warning("parked_ticket_refused", request_id=client_id(self.id), reason=problem)
            self.give_up_ticket()
        else:
            self._deliver(gained)

    def leave(self, output: Output) -> None:
        """Whoever reads `output` is gone, and with it the request, unless another goes on."""
        if output is self.client.output:
            self.end()

    def _on_read(self) -> None:
        if self.status is RequestStatus.QUEUED:
            self._host.waits_again(self)

    # ── what the dispatcher does with it ─────────────────────────────────────────────────────────

    async def reserve(self, decode: Worker, timeout_s: float) -> bool:
        """Ask a decode worker for a slot. False: refused, no answer, lost, or the request has ended
        meanwhile."""
        self._move(RequestStatus.RESERVING)
        slot = DecodeReservation(decode, self, self.id, self.attempt, self.num_sequences)
        self._leases.slot = slot
        await slot.answered(timeout_s)
        if self._leases.slot is not slot:
            return False
        if slot.refused:
            self._leases.let_go_of_work()
            self._move(RequestStatus.QUEUED)
        elif not slot.granted:
            self.begin_again()
        return slot.granted

    def start(self, start: Start) -> None:
        """Send the ticket to prefill; a slot was granted."""
        self._move(RequestStatus.PREFILLING)
        self.started_at = self.started_at or self._clock()
        where, prefill = (start.pool_id, start.root_hash), start.prefill
        ticket = self._tickets.submit(self.attempt, *where, self._leases.swapped)
        self._leases.computing = Entrusted(ticket, prefill)
        prefill.prefill_loads[self.id] = start.prefill_load
        suspect = self._leases.crash_attribution.hand_to(prefill)
        prefill.send(Submit(ticket, self.client.due_prompt_logprobs, suspect))

    def go_on(self) -> None:
        """Send the ticket at rest to the decode worker whose slot was granted."""
        self._move(RequestStatus.DECODING)
        assert self._leases.slot is not None
        self._admit(self._leases.slot.worker)

    def give_up_ticket(self) -> None:
        """Nobody goes on with the ticket at rest: its issuer lets go, and all is computed again."""
        self._leases.let_go_of_ticket()

    def begin_again(self, told: Told | None = None) -> None:
        """Back to the queue, with nothing but the tokens received; and a ticket at rest, as long as
        nobody was asked to claim it. (Of one that was swapped out a prefill worker finds out by
        itself whether it is still there.)"""
        if self.status is RequestStatus.DECODING:
            self._leases.let_go_of_ticket(told)
        self._wait_again(told)

    def go_elsewhere(self) -> None:
        """From a prefill worker that waits itself. Once it has begun, it stays."""
        if self.status is RequestStatus.PREFILLING and not self._leases.crash_attribution.has_begun:
            self.begin_again()

    # ── from one decode worker to another ────────────────────────────────────────────────────────

    def ask_to_move(self, target: Worker) -> DecodeReservation:
        """Ask another decode worker of the same pool for a slot to go on in, with nothing computed
        again; it runs on where it is. Only for who is settled."""
        slot = DecodeReservation(target, self, self.id, next(self._attempts), self.num_sequences)
        self._leases.next = slot
        return slot

    def move(self, slot: DecodeReservation) -> bool:
        """Go there, once the slot is answered. False: refused, no answer, or over meanwhile."""
        leases = self._leases
        if leases.next is not slot or leases.slot is None:
            return False
        if slot.granted:
            leases.slot.ask_back()
        else:
            leases.let_go_of_next()
        return slot.granted

    # ── what happens to it ───────────────────────────────────────────────────────────────────────

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        """Go on with what a worker says. Dropped: what is said about another attempt, by a worker
        that does not have the request, or at the wrong time."""
        if event.attempt != self.attempt:
            self._on_other_attempt(sender, event)
            return
        leases, speakers = self._leases, self._leases.speakers(self.attempt)
        match event:
            case Generated() if self.status is RequestStatus.DECODING and sender is leases.decode:
                self._on_generated(sender, event)
            case Prefilled() if (
                self.status is RequestStatus.PREFILLING and sender is leases.prefill
            ):
                self._on_prefilled(sender, event)
            case Reserved() if leases.slot and sender is leases.slot.worker:
                leases.slot.answer(event.granted)
            case Began():
                leases.crash_attribution.begun_by(sender)
            case Requeued(ticket=Ticket(swapped=Swapped()) as ticket) if sender is leases.decode:
                self._on_swapped_out(sender, ticket)
            case Requeued(ticket=Ticket() as ticket) if sender is leases.decode:
                self._on_handed_over(sender, ticket)
            case Requeued(ticket=None) if sender in speakers:
                self._on_requeued(sender, event)
            case Malformed() if sender in speakers:
                self._set_back(f"worker {sender.id} sent what makes no sense: {event.problem}")
            case Failed(code=InvalidRequest.code) if self._is_to_claim(sender):
                why = f"decode worker {sender.id} refused its ticket: {event.message}"
                self._set_back(why, (sender, event.attempt))
            case Failed() if sender in speakers:
                self.end(error_of(event.code, event.message), (sender, event.attempt))
            case _:
                log.debug("event_dropped", request_id=client_id(self.id), kind=type(event).__name__)

    def _is_to_claim(self, decode: Worker) -> bool:
        """Whether what it says is about a ticket that it has not claimed yet."""
        leases = self._leases
        return (
            self.status is RequestStatus.DECODING
            and decode is leases.decode
            and leases.at_rest is not None
        )

    def _on_other_attempt(self, sender: Worker, event: RequestEvent) -> None:
        """Of where it moves to, or of who keeps its ticket; anything else is old."""
        leases, told = self._leases, (sender, event.attempt)
        match event:
            case Reserved() if leases.next and told == leases.next.key:
                leases.next.answer(event.granted)
            case Requeued() | Failed() if leases.at_rest and told == leases.at_rest.key:
                leases.let_go_of_ticket(told)
                if self.status is RequestStatus.DECODING:  # who waits in line stays there
                    self._wait_again(told)
            case _:
                log.debug("event_dropped", request_id=client_id(self.id), kind=type(event).__name__)

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        """A worker's stream ended: by contract it lets go of all that came over it."""
        was_there = self._leases.lose(worker)
        if self.status is RequestStatus.DECODING and self._tickets.is_behind:
            died = False  # others have computed this much, and lived
        if error := self._leases.crash_attribution.lost_with(worker, died=died):
            self.end(error)
        elif was_there:
            self._set_back(f"{worker.member.role} worker {worker.id} was lost")

    def end(self, error: Exception | None = None, told: Told | None = None) -> None:
        """The end, for whatever reason. Again: no error."""
        if self.status is not RequestStatus.ENDED:
            self._leases.let_go(told)
            self.strand(error)

    def strand(self, error: Exception | None) -> None:
        """The end here, with nobody told: our streams to the workers break next, and what they run
        is parked for the gateway at which its client goes on. Again: no error."""
        if self.status is RequestStatus.ENDED:
            return
        self._move(RequestStatus.ENDED)
        self.client.close(error)
        self._host.has_ended(self, error)

    # ── the moves ────────────────────────────────────────────────────────────────────────────────

    def _on_prefilled(self, sender: Worker, event: Prefilled) -> None:
        """All that a stop string has not just ended goes to the decode worker."""
        if problem := self._tickets.problem_of_prefilled(event):
            self._set_back(f"prefill worker {sender.id} {problem}")
            return
        self._leases.crash_attribution.got_token(sender)
        self.client.output.stats.saw_prefill(event.ticket.num_cached_tokens)
        if event.prompt_logprobs:
            self.client.output.write_prompt(event.prompt_logprobs)
        self._tickets.note(event.ticket)
        if self._tickets.is_progress(event.outputs):
            self._num_setbacks = 0
        if event.ticket.sequences:
            self._leases.issue(event.ticket)
            self._deliver(event.outputs)
        else:
            self._deliver(event.outputs, told=(sender, event.attempt))
        if self.status is RequestStatus.PREFILLING:
            self.go_on()

    def _on_handed_over(self, sender: Worker, ticket: Ticket) -> None:
        """What ran is at rest: it goes on where a slot is kept for it, or waits for one in line."""
        problem = self._tickets.problem(ticket)
        if problem or self.status is not RequestStatus.DECODING:
            why = problem or "it was not at work"
            self._set_back(f"decode worker {sender.id} handed over a wrong ticket: {why}")
            return
        self._tickets.note(ticket)
        slot = self._leases.hand_over(ticket)
        if slot is None:
            self._wait_again()
            return
        self.moved_at = self._clock()
        self.client.output.stats.num_moves += 1
        self.attempt = slot.attempt
        self._admit(slot.worker)

    def _on_swapped_out(self, sender: Worker, ticket: Ticket) -> None:
        """It gave way, and its blocks were copied: a prefill worker will bring them back."""
        if problem := self._tickets.problem(ticket, blocks=False):
            self._set_back(f"decode worker {sender.id} swapped out a wrong ticket: {problem}")
            return
        self._tickets.note(ticket)
        self.client.output.stats.num_preemptions += 1
        self._leases.at_rest = Entrusted(ticket, sender)
        self._wait_again(told=self._leases.at_rest.key)

    def _admit(self, decode: Worker) -> None:
        """The ticket at rest goes to the worker where we have a slot."""
        assert self.at_rest is not None
        ticket = self._tickets.admit(self.at_rest.ticket, self.attempt)
        decode.send(Admit(ticket, suspect=self._leases.crash_attribution.hand_to(decode)))

    def _on_generated(self, sender: Worker, event: Generated) -> None:
        """What follows the stop string of a sequence is dropped: the worker will hear of it."""
        if self.client.is_over(event.index):
            return
        if problem := self._tickets.problem_of_step(event):
            self._set_back(f"decode worker {sender.id} {problem}")
            return
        if self._tickets.is_progress([event]):
            self._leases.crash_attribution.got_token(sender)
            self._num_setbacks = 0
        self._leases.ticket_claimed_by(sender)
        self._deliver([event], (sender, event.attempt) if event.finish_reason else None)

    def _on_requeued(self, sender: Worker, event: Requeued) -> None:
        told = sender, event.attempt
        if event.search is not None:
            self._tickets.note(event.search)
        if event.reason is RequeueReason.STALE_TICKET:
            self._set_back("its ticket was not there any more when it was claimed", told)
            return
        if event.reason is RequeueReason.DRAINING:
            sender.draining = True
        else:
            self.client.output.stats.num_preemptions += 1
        self.begin_again(told)

    def _deliver(self, outputs: Iterable[Generated], told: Told | None = None) -> None:
        """`told`: who knows by itself that the request ends with these, if it does. A client that
        does not keep up makes it come to rest, as for a move."""
        num_before = self.num_sequences
        for output in outputs:
            if self.client.is_over(output.index):
                continue
            rest = output.finish_reason, output.logprobs, output.score
            self.client.write(output.index, output.token_ids, *rest)
            self._end_early(output)
        if not self.num_sequences:
            self.end(told=told)
        elif self.num_sequences < num_before:
            self._leases.keep(self.num_sequences)
        if self.client.pauses and self.settled_at and self._leases.slot:
            self._leases.slot.ask_back()

    def _end_early(self, output: Generated) -> None:
        """Where a stop string has ended one of several, the worker that runs them is told."""
        stopped = self.client.is_over(output.index) and output.finish_reason is None
        if (
            stopped
            and self.num_sequences
            and self.status is RequestStatus.DECODING
            and self._leases.decode
        ):
            self._leases.decode.abort(self.id, self.attempt, output.index)

    def _set_back(self, why: str, told: Told | None = None) -> None:
        self._num_setbacks += 1
        log.warning(
            "request_set_back", request_id=client_id(self.id), attempt=self.attempt, why=why
        )
        if self._num_setbacks > MAX_SETBACKS:
            self.end(Unavailable(f"given up after {self._num_setbacks} attempts: {why}"), told)
        else:
            self.begin_again(told)

    def _wait_again(self, told: Told | None = None) -> None:
        """Back to the queue, at its place."""
        self._leases.let_go_of_work(told)
        self.attempt = next(self._attempts)
        self.num_attempts += 1
        self.waiting_since = self._clock()
        self._move(RequestStatus.QUEUED)
        self._host.waits_again(self)

    def _move(self, status: RequestStatus) -> None:
        self.status = self.status.next(status)
