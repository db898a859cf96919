"""One request at a decode worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from services.engine.batch import LoadedAdapter
from services.engine.messages import Advance
from services.protocol.messages import Generated
from services.protocol.ticket import Ticket
from services.worker.requests.events import (
    HANDED_OVER,
    Ending,
    Session,
    hypothesis_events,
    token_events,
)
from services.worker.requests.trace import NO_TRACE, JobTrace


class State(Enum):
    """Where a request stands at this worker.

        RESERVED -> CLAIMING -> RUNNING -------------------------> ENDED
                                   |-----------------> DETACHED -> ENDED
                                   `--> SWAPPING ----> DETACHED -> ENDED

    RESERVED: decode slots are kept. CLAIMING: the worker asks the store for the holder. SWAPPING:
    the KV of a preempted request is being copied to the swap pool. DETACHED: the ticket waits for a
    claim, with blocks in the worker's pool or in the swap pool. Every state may go to ENDED.
    """

    RESERVED = auto()
    CLAIMING = auto()
    RUNNING = auto()
    SWAPPING = auto()
    DETACHED = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Job:
    """One attempt of a request.

    `num_sequences`: the decode slots that were reserved. `ticket`: None until the admit; its
    `holder_epoch` is the claimed one from the claim on. `living`: the indices of the sequences that
    have not ended. `suspect`: whether the request may have killed a worker. `ending`: set once the
    request is to end early or to be detached. `adapter`: kept while the job is here.
    """

    session: Session
    request_id: str
    attempt: int
    num_sequences: int
    state: State = State.RESERVED
    ticket: Ticket | None = None
    living: set[int] = field(default_factory=set)
    suspect: bool = False
    ending: Ending | None = None
    trace: JobTrace = NO_TRACE
    adapter: LoadedAdapter | None = None

    @property
    def claim(self) -> tuple[str, int] | None:
        """(holder id, epoch of the detached ticket) while the job claims or runs it, else None."""
        if self.ticket is None or self.state not in (State.CLAIMING, State.RUNNING):
            return None
        is_claimed = self.state is State.RUNNING
        return self.ticket.holder_id, self.ticket.holder_epoch - is_claimed

    @property
    def num_slots(self) -> int:
        """How many decode slots the job occupies."""
        if self.state in (State.SWAPPING, State.DETACHED):
            return 0
        if self.ticket is None:
            return self.num_sequences
        return self.ticket.width if self.searches else len(self.living)

    @property
    def searches(self) -> bool:
        """Whether this is a beam search."""
        return self.ticket is not None and self.ticket.sampling.beam is not None

    @property
    def has_blocks(self) -> bool:
        """Whether the job can be kept for another gateway: it has or claims blocks in the worker's
        pool, and is not being swapped out."""
        swapped = self.ticket is not None and self.ticket.swapped is not None
        return not swapped and self.state in (State.CLAIMING, State.RUNNING, State.DETACHED)

    def continues(self, wanted: Ticket) -> bool:
        """Whether this job continues the request of `wanted`: same prompt, parameters and tokens.

        A job that runs is compared by the tokens that its ticket brought; those generated since are
        in the engine.
        """
        ticket = self.ticket
        if ticket is None or not self.has_blocks or self.ending not in (None, HANDED_OVER):
            return False
        known = {state.index: state.token_ids for state in living_of(self).sequences}
        return (
            ticket.request_id == wanted.request_id
            and ticket.root_hash == wanted.root_hash
            and ticket.prompt_token_ids == wanted.prompt_token_ids
            and ticket.sampling.samples_like(wanted.sampling)
            and all(
                state.index in known and _agree(known[state.index], state.token_ids)
                for state in wanted.sequences
            )
        )

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway session, request id, attempt)."""
        return id(self.session), self.request_id, self.attempt


def ticket_of(job: Job) -> Ticket:
    """The ticket of an admitted job."""
    assert job.ticket is not None
    return job.ticket


def living_of(job: Job) -> Ticket:
    """The ticket of a job, without the sequences that have ended since its admit."""
    ticket = ticket_of(job)
    return replace(ticket, sequences=tuple(s for s in ticket.sequences if s.index in job.living))


def take_outputs(job: Job, advance: Advance) -> Sequence[Generated]:
    """The outputs of one step for the gateway. Sequences that ended in it are no longer living."""
    ticket = ticket_of(job)
    if advance.beams is not None:
        is_running = Generated(*ticket.key, 0, len(ticket.prompt_token_ids))
        return hypothesis_events(ticket, advance.hypotheses) or [is_running]
    tokens = [token for token in advance.tokens if token.index in job.living]
    job.living.difference_update(token.index for token in tokens if token.finish)
    return token_events(ticket, tokens, advance.verified)


def _agree(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether one begins with the other."""
    return all(a == b for a, b in zip(first, second, strict=False))
