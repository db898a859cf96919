"""One request at a decode worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.engine.sequences.results import Advance
from services.protocol.messages import Generated, Resume
from services.protocol.ticket import Ticket
from services.worker.requests.events import HANDED_OVER
from services.worker.requests.jobs import Job, State


@dataclass(eq=False, slots=True)
class DecodeJob(Job):
    """One attempt of a request. From the claim on, the epoch of its ticket is the claimed one."""

    state: State = State.CLAIMING
    living: set[int] = field(init=False)
    """The indices of the sequences that have not ended."""

    def __post_init__(self) -> None:
        self.living = {sequence.index for sequence in self.ticket.sequences}

    @property
    def claim(self) -> tuple[str, int] | None:
        """(holder id, epoch of the detached ticket) while the job claims or runs it, else None."""
        if self.state not in (State.CLAIMING, State.RUNNING):
            return None
        return self.ticket.holder_id, self.ticket.holder_epoch - (self.state is State.RUNNING)

    @property
    def num_slots(self) -> int:
        """How many decode slots the job occupies."""
        if self.state in (State.SWAPPING, State.DETACHED):
            return 0
        return self.ticket.width if self.searches else len(self.living)

    @property
    def searches(self) -> bool:
        """Whether this is a beam search."""
        return self.ticket.sampling.beam is not None

    @property
    def has_blocks(self) -> bool:
        """Whether the job can be kept for another gateway: it has or claims blocks in the worker's
        pool, and is not being swapped out."""
        kept = self.state in (State.CLAIMING, State.RUNNING, State.DETACHED)
        return kept and self.ticket.swapped is None

    @property
    def living_ticket(self) -> Ticket:
        """The ticket without the sequences that have ended since the admit."""
        living = (one for one in self.ticket.sequences if one.index in self.living)
        return replace(self.ticket, sequences=tuple(living))

    def is_wanted(self, wanted: Resume) -> bool:
        """Whether another gateway asks for this request, which can be kept for it."""
        can_move = self.has_blocks and self.ending in (None, HANDED_OVER)
        is_named = self.ticket.request_id == wanted.request_id
        return can_move and is_named and self.ticket.digest == wanted.digest

    def take_outputs(self, advance: Advance) -> Sequence[Generated]:
        """The outputs of one step for the gateway. Sequences that ended in it no longer live. A
        gateway that takes the request over gets no outputs of the attempt before: they are in the
        ticket that it asked for."""
        ticket, outputs = self.ticket, advance.outputs
        if not self.searches:
            outputs = [one for one in outputs if one.index in self.living]
            self.living.difference_update(one.index for one in outputs if one.finish_reason)
        elif not outputs:
            outputs = [Generated(*ticket.key, 0, len(ticket.prompt_token_ids))]  # still running
        return [one for one in outputs if one.attempt == ticket.attempt]
