"""The lifecycle of one request: the state machine that takes it through the workers.

| file | holds |
|---|---|
| `status.py` | the statuses, and which may follow which |
| `attempt.py`, `lease.py` | the leases of the request at workers |
| `pulling.py` | copies its KV to another pool |
| `tickets.py` | builds tickets, and keeps what workers answer |
| `worker_events.py` | applies the messages of workers to the request |
| `crash_attribution.py` | whether a crash may be the request's fault |
| `reading.py` | watches the client: its deadline, and whether it reads |

Law 7: the tokens that the gateway received are final. Every attempt starts from the prompt and
these tokens, messages of other attempts are dropped, and a ticket is refused unless it continues
exactly these tokens.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from blockstore.records import PrefixHash
from services.gateway.identity import client_id
from services.gateway.request.admitted import AdmittedRequest
from services.gateway.request.attempt import Attempt
from services.gateway.request.crash_attribution import CrashAttribution
from services.gateway.request.pulling import Pull, Pulling
from services.gateway.request.queue_position import QueuePosition
from services.gateway.request.reading import Reading
from services.gateway.request.status import RequestStatus
from services.gateway.request.tickets import Tickets
from services.gateway.request.timeline import Phase, Timeline
from services.gateway.streaming.output import Output
from services.gateway.workers.lease import DecodeReservation, DetachedTicket, Lease, PrefillLease
from services.gateway.workers.worker import PrefillLoad, Worker
from services.protocol.messages import Admit, Generated, Submit
from services.protocol.ticket import Swapped, Ticket, TicketState
from services.runtime.errors import DuplicateRequest, Unavailable
from services.runtime.logging import get_logger

log = get_logger(__name__)

MAX_RETRIES = 3
"""How often in a row, without a token in between, a request is requeued because a worker was lost
or sent an impossible message. (`crash_attribution.py` counts lost workers as well.)"""


class RequestHost(Protocol):
    """Is told when a request is queued, and when it is closed."""

    def on_queued(self, request: "Request") -> None: ...

    def on_closed(self, request: "Request", error: Exception | None) -> None: ...

    @property
    def pull(self) -> Pull: ...


class Request:
    """One request, from the queue to its end.

    `attempt_numbers`: the gateway uses each number once. So a worker that still has a lease of this
    request does not confuse it with the client's next request of the same id.
    """

    def __init__(
        self,
        asked: AdmittedRequest,
        position: QueuePosition,
        output: Output,
        host: RequestHost,
        attempt_numbers: Iterator[int],
        read_window_s: float = 10.0,
    ) -> None:
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self.id = asked.request_id
        self.asked, self.output = asked, output
        self.status = RequestStatus.QUEUED
        self.attempt = Attempt(self.id, next(attempt_numbers))
        self.num_attempts = 1
        self.waiting_since = self._clock()
        self.started_at: float | None = None
        self.moved_at = -math.inf
        self._reading = Reading(read_window_s, self._on_read, self.close)
        self._reading.begin(output, asked.deadline)
        self.tickets = Tickets(self, position)
        self.crash_attribution = CrashAttribution()
        self.trace = asked.trace
        self.timeline = Timeline(self.trace)
        self._host = host
        self._pulling = Pulling(host.pull)
        self._attempt_numbers = attempt_numbers
        self.num_retries = 0

    @property
    def is_paused(self) -> bool:
        """Whether backpressure is on: the client has not read everything yet."""
        return self._reading.is_paused

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those received so far of the sequences that have not ended."""
        num_received = sum(len(sequence.tokens) for sequence in self.output.living)
        return len(self.asked.prompt_token_ids) + num_received

    @property
    def unsent_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens the logprobs of the prompt include; None if the client
        did not ask for prompt logprobs, or has them."""
        return None if self.output.has_begun else self.asked.prompt_logprobs

    def timeout_ms(self) -> int:
        """Milliseconds until the deadline, at least 1; 0 if the client set no deadline."""
        deadline = self.asked.deadline
        return 0 if deadline is None else max(1, round((deadline - self._clock()) * 1000))

    @property
    def is_decoding(self) -> bool:
        return self.status is RequestStatus.DECODING

    @property
    def position(self) -> QueuePosition:
        return self.tickets.position

    @property
    def client_name(self) -> str:
        """Among whom the queue is shared."""
        return self.asked.caller.client

    @property
    def has_run(self) -> bool:
        """Whether a worker has had the request."""
        return self.started_at is not None

    @property
    def num_slots(self) -> int:
        """The decode slots to reserve; 0: the request ends with its prefill."""
        return self.num_sequences if self.asked.sampling.pooling is None else 0

    @property
    def num_sequences(self) -> int:
        """The number of decode slots that the request needs: one for each sequence that has not
        ended. A beam search needs one for each beam until its end."""
        num_living = len(self.output.living)
        return self.asked.width if num_living and self.asked.sampling.beam else num_living

    @property
    def _swapped(self) -> Swapped | None:
        """Where the KV of the request is swapped out."""
        detached = self.attempt.detached
        return None if detached is None else detached.ticket.swapped

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is not in the swap pool, which has all but the last of each sequence."""
        return self.num_sequences if self._swapped else self.num_tokens

    @property
    def is_computed(self) -> bool:
        """Whether a decode worker can claim the detached ticket as it is."""
        return self.attempt.detached is not None and self._swapped is None

    @property
    def movable_from(self) -> Worker | None:
        """The decode worker that can hand the request over: it has claimed the ticket. None: there
        is no such worker, or the request moves already."""
        if not self.is_decoding:
            return None
        attempt = self.attempt
        is_busy = attempt.detached or attempt.target
        return None if is_busy or attempt.decode is None else attempt.decode.worker

    # ── the client ───────────────────────────────────────────────────────────────────────────────

    def resume(self, asked: AdmittedRequest, output: Output) -> None:
        """Continue for a client that lost its stream, with another call. `output` holds what the
        client has received and gets the rest; the deadline of the new call holds.
        DuplicateRequest: the call is for another request."""
        before = self.output
        if not asked.continues(self.asked) or output.is_ahead_of(before):
            raise DuplicateRequest("the running request is not the one to continue")
        before.close(DuplicateRequest("another call continues this request"))
        self.asked, self.output = asked, output
        self._reading.begin(output, asked.deadline)
        # The gateway does not keep the logprobs of tokens that the client has not received.
        must_recompute = asked.wants_logprobs and before.is_ahead_of(output)
        if not must_recompute:
            output.catch_up(before)
        self._reading.resume()
        if must_recompute:
            self._recompute()
        elif output.has_ended:
            self.close()
        if asked.trace is not None and self.trace is not None:
            asked.trace.join(self.trace)

    def _recompute(self) -> None:
        """Start again: sequences that run, or are detached, are ahead of the client's tokens."""
        if detached := self.attempt.detached:
            detached.abort()
        if self.status is not RequestStatus.QUEUED:
            self.requeue()

    def adopt(self, detached: DetachedTicket) -> None:
        """Continue a request of another gateway, with its queue position, its ticket, and the
        tokens that the client has not received. The request may end with these tokens."""
        ticket = detached.ticket
        gained = self.tickets.adopt(ticket)
        self.started_at = self._clock()
        self.attempt = Attempt(self.id, self.attempt.number, detached)
        if gained and self.asked.wants_logprobs:
            detached.abort()  # the logprobs of these tokens are lost: compute the tokens again
        elif problem := self.tickets.problem(gained, ticket):
            log.warning("parked_ticket_refused", request_id=client_id(self.id), reason=problem)
            detached.abort()
        else:
            self.deliver(gained)

    def end_call(self, output: Output) -> None:
        """The call that reads `output` has ended: close the request, unless another call continues
        it."""
        if output is self.output:
            self.close()

    def _on_read(self) -> None:
        if self.status is RequestStatus.QUEUED:
            self._host.on_queued(self)

    # ── placement ────────────────────────────────────────────────────────────────────────────────

    async def reserve(self, decode: Worker, timeout_s: float) -> bool:
        """Ask a decode worker for slots. False: it refused, did not answer or was lost, or the
        request was closed meanwhile."""
        self._move(RequestStatus.RESERVING)
        attempt = self.attempt
        reservation = DecodeReservation(decode, self.id, attempt.number, self.num_sequences)
        attempt.decode = reservation
        await reservation.wait_for_answer(timeout_s)
        if reservation.released:
            return False
        if reservation.refused:
            reservation.finish()
            self._move(RequestStatus.QUEUED)
        elif not reservation.granted:
            self.requeue()
        return reservation.granted

    def submit(
        self,
        prefill: Worker,
        load: PrefillLoad,
        pool_id: str,
        root_hash: PrefixHash,
        source_pool_id: str = "",
    ) -> None:
        """Send the ticket to a prefill worker, with `load` to compute. The decode worker has
        granted the slots, if the request needs any. `source_pool_id`: a pool whose cached prefix is
        copied first; if that fails, it is computed."""
        if not self.num_slots:
            self._move(RequestStatus.RESERVING)  # nothing to reserve
        self.started_at = self.started_at or self._clock()
        ticket = self.tickets.submit(self.attempt.number, pool_id, root_hash, self._swapped)
        if not source_pool_id:
            self._submit(prefill, load, ticket)
            return

        def go_on(_: object) -> None:
            if prefill.usable:
                self._submit(prefill, load, replace(ticket, timeout_ms=self.timeout_ms()))
            else:
                self.requeue()

        self._move(RequestStatus.PULLING)
        self._pulling.begin(ticket, source_pool_id, pool_id, go_on, go_on)

    def _submit(self, prefill: Worker, load: PrefillLoad, ticket: Ticket) -> None:
        self._move(RequestStatus.PREFILLING)
        ticket = self._traced(ticket)
        self.crash_attribution.assign(prefill)
        submit = Submit(ticket, self.unsent_prompt_logprobs)
        self.attempt.prefill = PrefillLease(prefill, submit, load)

    def admit(self) -> None:
        """Send the detached ticket to the decode worker that has granted the slots. If its KV is in
        another pool, a mover copies it first."""
        was_decoding = self.is_decoding
        decode, detached = self.attempt.decode, self.attempt.detached
        assert decode is not None
        assert detached is not None
        detached.is_sent = True
        if detached.ticket.pool_id != decode.worker.member.pool_id:
            self._pull_ticket(detached.ticket, decode.worker)
            return
        if not was_decoding:
            self._move(RequestStatus.DECODING)
        phase = Phase.MOVING if was_decoding else Phase.HAND_OFF
        self.timeline.enter(phase, decode.worker.id)
        ticket = self._traced(self.tickets.admit(detached.ticket, self.attempt.number))
        self.crash_attribution.assign(decode.worker)
        decode.worker.send(Admit(ticket))

    def _pull_ticket(self, ticket: Ticket, decode: Worker) -> None:
        """Copy the KV of the detached ticket to the pool of its decode worker, then admit it."""
        target = decode.member.pool_id

        def on_pulled(pulled: DetachedTicket | None) -> None:
            if pulled is None:
                self.retry_or_fail(f"the mover of {target} answered without a ticket")
                return
            self.attempt.replace_detached(pulled)
            self.output.stats.num_moves += 1
            self.admit()

        def on_failure(reason: str) -> None:
            self.retry_or_fail(f"its KV was not copied to {target}: {reason}")

        self._move(RequestStatus.PULLING)
        self.timeline.enter(Phase.HAND_OFF)
        asked = self.tickets.admit(ticket, self.attempt.number)
        self._pulling.begin(asked, ticket.pool_id, target, on_pulled, on_failure)

    def _traced(self, ticket: Ticket) -> Ticket:
        """The ticket with the trace context of this attempt."""
        traceparent = self.timeline.traceparent
        if ticket.traceparent == traceparent:
            return ticket
        return replace(ticket, traceparent=traceparent)

    def requeue(self, phase: Phase = Phase.WAITING) -> None:
        """Return to the queue, at the same position, with the tokens received; see also
        `Attempt.next_attempt`."""
        self._pulling.cancel()
        self.timeline.enter(phase)
        self.crash_attribution.unassign()
        self.attempt = self.attempt.next_attempt(next(self._attempt_numbers))
        self.num_attempts += 1
        self.waiting_since = self._clock()
        self._move(RequestStatus.QUEUED)
        self._host.on_queued(self)

    # ── moves between decode workers ─────────────────────────────────────────────────────────────

    def reserve_target(self, target: Worker) -> DecodeReservation:
        """Ask another decode worker of the pool for slots. Meanwhile the request runs on."""
        number = next(self._attempt_numbers)
        reservation = DecodeReservation(target, self.id, number, self.num_sequences)
        self.attempt.target = reservation
        return reservation

    def detach(self, lease: Lease, state: TicketState) -> None:
        """Take note that the worker of a lease has detached its sequences."""
        pool_id = lease.worker.member.pool_id
        self.attempt.detach(lease, self.tickets.detached(state, pool_id))

    def request_move(self, target: DecodeReservation) -> bool:
        """Ask for the hand-over, once the target has answered. False: the target refused or did not
        answer, or another move has replaced this one."""
        decode = self.attempt.decode
        if self.attempt.target is not target or decode is None:
            return False
        if target.granted:
            decode.request_hand_over()
        else:
            target.abort()
        return target.granted

    def continue_at(self, moved: Attempt) -> None:
        """Send the ticket, which was handed over, to the target of a move."""
        self.attempt = moved
        self.moved_at = self._clock()
        self.output.stats.num_moves += 1
        self.admit()

    # ── tokens, retries and the end ──────────────────────────────────────────────────────────────

    def deliver(self, outputs: Sequence[Generated]) -> None:
        """Write tokens to the client. The request closes with its last sequence. If the client
        reads too slowly, the decode worker hands the request over."""
        for new in outputs:
            if not self.output.is_over(new.index):
                self.output.write(new)
                self._reading.check(self.output)
                self._abort_stopped(new)
        decode = self.attempt.decode
        if not (num_sequences := self.num_sequences):
            if decode and self.is_decoding and outputs[-1].finish_reason is not None:
                decode.finish()  # the worker has ended the last sequence by itself
            self.close()
            return
        self.attempt.shrink_to(num_sequences)
        if decode and self.is_paused and self.movable_from:
            decode.request_hand_over()

    def _abort_stopped(self, new: Generated) -> None:
        """Tell the decode worker that a stop string has ended one of several sequences."""
        stopped = self.output.is_over(new.index) and new.finish_reason is None
        decode = self.attempt.decode
        if stopped and decode and self.is_decoding and self.num_sequences:
            decode.abort_sequence(new.index)

    def retry_or_fail(self, reason: str) -> None:
        """Requeue the request, or close it after too many retries."""
        self.num_retries += 1
        log.warning(
            "request_set_back",
            request_id=client_id(self.id),
            attempt=self.attempt.number,
            why=reason,
        )
        self.timeline.set_back(reason)
        if self.num_retries > MAX_RETRIES:
            # The log has the reasons. They name workers and pools, which are no client's business.
            text = f"{self.num_retries} attempts of this request were set back; try again"
            self.close(Unavailable(text))
        else:
            self.requeue(Phase.LOST)

    def close(self, error: Exception | None = None, *, aborts: bool = True) -> None:
        """End the request. A second call does nothing.

        Without `aborts` workers get no message: this gateway's streams break next, and workers park
        the request for the gateway at which the client resumes.
        """
        if self.status is RequestStatus.ENDED:
            return
        self._pulling.cancel()
        if aborts:
            self.crash_attribution.unassign()
            self.attempt.close()
        self._move(RequestStatus.ENDED)
        self.timeline.end()
        self._reading.end()
        self.output.close(error)
        self._host.on_closed(self, error)

    def _move(self, status: RequestStatus) -> None:
        self.status = self.status.next(status)
