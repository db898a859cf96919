"""The one object of a request, from its admission to its end.

| file | holds |
|---|---|
| `request.py` | what was asked, its state, the client's calls, retries and the end |
| `sending.py` | sends the request to its workers |
| `resuming.py` | continues the request for a client that lost its stream |
| `worker_events.py` | applies the messages of workers to the request |
| `status.py` | the statuses, and which may follow which |
| `attempt.py`, `workers/lease.py` | the leases of the request at workers |
| `tickets.py` | builds tickets, and keeps what workers answer |
| `search.py` | the progress of a beam search |
| `crash_attribution.py` | whether a crash may be the request's fault |
| `record.py` | what happened to it, and when |

Law 7: the tokens that the gateway received are final. Every attempt starts from the prompt and
these tokens, messages of other attempts are dropped, and a ticket is refused unless it continues
exactly these tokens.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blockstore.records import PoolSpec
from services.gateway.api import PromptRequest, RetainDirective
from services.gateway.identity import client_id
from services.gateway.output.output import Output
from services.gateway.output.parser.message import Parsing
from services.gateway.request.attempt import Attempt
from services.gateway.request.capacity import capacity_problem
from services.gateway.request.crash_attribution import CrashAttribution
from services.gateway.request.events import Holders, Phase, SetBack
from services.gateway.request.record import Record, now_ms
from services.gateway.request.status import RequestStatus
from services.gateway.request.tickets import Tickets
from services.gateway.request.trace import RequestTrace
from services.gateway.workers.lease import DetachedTicket, Lease
from services.gateway.workers.worker import Worker
from services.protocol.messages import Generated, Pooling
from services.protocol.ticket import Adapter, SamplingParams, Swapped, Ticket, TicketState
from services.runtime.errors import DeadlineExceeded, Overloaded, Unavailable
from services.runtime.logging import get_logger

log = get_logger(__name__)

MAX_RETRIES = 3
"""How often in a row, without a token in between, a request is requeued because a worker was lost
or sent an impossible message. (`crash_attribution.py` counts lost workers as well.)"""


_WAITS = (Phase.WAITING, Phase.PREEMPTED, Phase.LOST)

Pull = Callable[[Ticket, str, str], Awaitable[DetachedTicket | None]]
"""Copies a ticket's KV from the pool of the first id to the pool of the second; see
`services.gateway.workers.movers`."""


class RequestHost(Protocol):
    """Is told when a request is queued, and when it is closed."""

    attempt_numbers: Iterator[int]
    """Gives each number once. So a worker that still has a lease of a request does not confuse it
    with the client's next request of the same id."""

    def on_queued(self, request: "Request") -> None: ...

    def on_closed(self, request: "Request", error: Exception | None) -> None: ...

    def holders(self, pool_id: str) -> Holders: ...

    @property
    def pull(self) -> Pull: ...


@dataclass(eq=False)
class Request:
    """One request. Admission makes it, complete and checked; `begin` lets it wait for workers."""

    asked: PromptRequest
    """The request as the client sent it. A call that resumes the request replaces it."""
    id: str
    """The scoped id (`services.gateway.identity`), which gateway and workers use."""
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report for each prompt token; None reports none."""
    pooling: Pooling | None = None
    """How to make the embedding; None if the request generates."""
    parsing: Parsing | None = None
    """How to parse the messages; None if the client gets text only."""
    adapter: Adapter | None = None
    """The LoRA adapter that the client names as its model; None if it names the model."""
    retain: tuple[RetainDirective, ...] = ()
    trace: RequestTrace | None = None
    """None if the request is not traced."""
    embedding: tuple[float, ...] = ()
    output: Output = field(init=False)
    """The deltas for the client of the present call, and the tokens that it has received."""

    def begin(self, host: RequestHost, order: int) -> None:
        """Enter the order of service at `order` (`queue_order`)."""
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.host = host
        self.status = RequestStatus.QUEUED
        self.attempt = Attempt(self.id, next(host.attempt_numbers))
        self.num_attempts, self.num_retries = 1, 0
        self.waiting_since = self.clock()
        self.started_at: float | None = None
        self.moved_at = -math.inf
        self.move_cause = ""
        """Why the request moves to the worker of `attempt.target`."""
        self.tickets = Tickets(self, order)
        self.crash_attribution = CrashAttribution()
        self.record = self._new_record(order)
        self.pull_task: asyncio.Task[None] | None = None
        """The task that copies the KV to another pool; None if nothing is copied."""
        self._deadline_timer: asyncio.TimerHandle | None = None
        self.watch_deadline()

    def _new_record(self, order: int) -> Record:
        age_s = self.clock() - self.output.stats.arrived_at
        return Record(
            client_id(self.id),
            self.asked.caller,
            self.output.stats,
            self.trace,
            order,
            self.model,
            self.sampling.n or 1,
            cache_salt=hash(self.cache_salt),
            adapter=self.adapter.digest if self.adapter else "",
            arrived_at=time.monotonic() - age_s,
            arrived_ms=now_ms() - round(age_s * 1000),
        )

    def watch_deadline(self) -> None:
        """End the request at the deadline of the present call, in place of an earlier call's."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if (deadline := self.deadline) is not None:
            error = DeadlineExceeded("the request's deadline has passed")
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_at(deadline, self.close, error)

    # ── what it needs ────────────────────────────────────────────────────────────────────────────

    @property
    def deadline(self) -> float | None:
        """A time of the event loop's clock."""
        timeout_s = self.asked.timeout_s
        return None if timeout_s is None else self.output.stats.arrived_at + timeout_s

    @property
    def cache_salt(self) -> str:
        """The salt of the prefix hashes: the client's, scoped by its tenant."""
        return self.asked.caller.salt(self.asked.cache_salt)

    def capacity_problem(self, spec: PoolSpec) -> str:
        """Why the request can never fit a pool with this spec; "" if it can."""
        num_prompt, width = len(self.prompt_token_ids), max(1, self.sampling.width)
        return capacity_problem(num_prompt, self.sampling.max_tokens, spec, width)

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens that the client has not received need logprobs."""
        return self.sampling.logprobs is not None or self.unsent_prompt_logprobs is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those received so far of the sequences that have not ended."""
        num_received = sum(len(sequence.tokens) for sequence in self.output.living)
        return len(self.prompt_token_ids) + num_received

    @property
    def unsent_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens the logprobs of the prompt include; None if the client
        did not ask for prompt logprobs, or has them."""
        return None if self.output.has_begun else self.prompt_logprobs

    def timeout_ms(self) -> int:
        """Milliseconds until the deadline, at least 1; 0 if the client set no deadline."""
        deadline = self.deadline
        return 0 if deadline is None else max(1, round((deadline - self.clock()) * 1000))

    @property
    def traceparent(self) -> str:
        """The trace context for workers; "" if the request is not traced."""
        return "" if self.trace is None else self.trace.traceparent

    @property
    def is_decoding(self) -> bool:
        return self.status is RequestStatus.DECODING

    @property
    def order(self) -> int:
        return self.tickets.order

    @property
    def num_sequences(self) -> int:
        """The number of decode slots that the request needs: one for each sequence that has not
        ended. A search needs all of its slots until its end."""
        num_living = len(self.output.living)
        return self.sampling.width if num_living and self.tickets.search else num_living

    @property
    def swapped(self) -> Swapped | None:
        """Where the KV of the request is swapped out."""
        detached = self.attempt.detached
        return None if detached is None else detached.ticket.swapped

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is not in the swap pool, which has all but the last of each sequence."""
        return self.num_sequences if self.swapped else self.num_tokens

    @property
    def is_computed(self) -> bool:
        """Whether a decode worker can claim the detached ticket as it is."""
        return self.attempt.detached is not None and self.swapped is None

    @property
    def movable_from(self) -> Worker | None:
        """The decode worker that can hand the request over: it has claimed the ticket. None if
        there is no such worker, or the request moves already."""
        if not self.is_decoding:
            return None
        attempt = self.attempt
        is_busy = attempt.detached or attempt.target
        return None if is_busy or attempt.decode is None else attempt.decode.worker

    @property
    def pool_held(self) -> str:
        """The pool in which the request holds blocks, as far as the gateway knows; "" if none."""
        lease = self.attempt.decode if self.is_decoding else self.attempt.prefill
        return "" if lease is None or self.record.phase in _WAITS else lease.worker.member.pool_id

    def other_holders(self, pool_id: str) -> Holders:
        """The other requests of this gateway that hold most blocks of a pool."""
        name = client_id(self.id)
        return tuple(one for one in self.host.holders(pool_id) if one[0] != name)

    # ── the client ───────────────────────────────────────────────────────────────────────────────

    def end_call(self, output: Output) -> None:
        """The call that reads `output` has ended: close the request, unless another call continues
        it."""
        if output is self.output:
            self.close()

    # ── attempts, tokens and the end ─────────────────────────────────────────────────────────────

    def requeue(self, phase: Phase = Phase.WAITING) -> None:
        """Return to the queue, at the same position, with the tokens received; see also
        `Attempt.next_attempt`."""
        self._cancel_pull()
        self.record.enter(phase)
        self.crash_attribution.assign(None)
        self.attempt = self.attempt.next_attempt(self.next_number())
        self.num_attempts += 1
        self.waiting_since = self.clock()
        self.move_to(RequestStatus.QUEUED)
        self.host.on_queued(self)

    def detach(self, lease: Lease, state: TicketState) -> None:
        """Take note that the worker of a lease has detached its sequences."""
        pool_id = lease.worker.member.pool_id
        self.attempt.detach(lease, self.tickets.detached(state, pool_id))

    def deliver(self, outputs: Sequence[Generated]) -> None:
        """Write tokens to the client. The request closes with its last sequence, or if the client
        reads too slowly."""
        for new in outputs:
            if not self.output.is_over(new.index):
                self.output.write(new)
                self._abort_stopped(new)
        decode = self.attempt.decode
        if not (num_sequences := self.num_sequences):
            if decode and self.is_decoding and outputs[-1].finish_reason is not None:
                decode.finish()  # the worker has ended the last sequence by itself
            self.close()
            return
        self.attempt.shrink_to(num_sequences)
        if self.output.is_neglected:
            text = "the client reads too slowly; its request was cancelled"
            self.close(Overloaded(text, 0.0))

    def _abort_stopped(self, new: Generated) -> None:
        """Tell the decode worker that a stop string has ended one of several sequences."""
        stopped = self.output.is_over(new.index) and new.finish_reason is None
        decode = self.attempt.decode
        if stopped and decode and self.is_decoding and self.num_sequences:
            decode.abort_sequence(new.index)

    def retry_or_fail(self, reason: str) -> None:
        """Requeue the request, or close it after too many retries."""
        self.num_retries += 1
        self.record.note(SetBack(reason))
        log.warning(
            "request_set_back",
            request_id=client_id(self.id),
            attempt=self.attempt.number,
            why=reason,
        )
        if self.trace is not None:
            self.trace.set_back(reason)
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
        self._cancel_pull()
        if aborts:
            self.crash_attribution.assign(None)
            self.attempt.close()
        self.move_to(RequestStatus.ENDED)
        self.record.end(self.output.finish_reason, error)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self.output.close(error)
        self.host.on_closed(self, error)

    def _cancel_pull(self) -> None:
        task, self.pull_task = self.pull_task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def next_number(self) -> int:
        """The number of another attempt."""
        return next(self.host.attempt_numbers)

    def move_to(self, status: RequestStatus) -> None:
        self.status = self.status.next(status)
