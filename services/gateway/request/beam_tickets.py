"""The tickets of a beam search. Its client gets nothing before the end, so there is nothing to hold
them to but the shape of a search; and where it stands is known from them alone.

See ADR 78.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from blockstore.records import PrefixHash
from services.gateway.request.tickets import Tickets
from services.gateway.scheduling.request_queue import QueuePosition
from services.gateway.streaming.client import Client
from services.protocol.messages import Generated, Prefilled
from services.protocol.ticket import BeamState, Swapped, Ticket, TicketSequence, first_of


class BeamTickets(Tickets):
    """What the last ticket said of the search goes into the next one. Lost with its worker is what
    no ticket has said: that is searched again, with the same result."""

    def __init__(self, client: Client, position: QueuePosition) -> None:
        super().__init__(client, position)
        self._beams: BeamState | None = None
        self._sequences: tuple[TicketSequence, ...] = (TicketSequence(0),)
        self._length = 0  # of its beams, by the last ticket and the steps that were heard of since
        self._longest = 0  # that they ever were

    def submit(
        self, attempt: int, pool_id: str, root_hash: PrefixHash, swapped: Swapped | None
    ) -> Ticket:
        ticket = super().submit(attempt, pool_id, root_hash, swapped)
        self._submitted = replace(ticket, sequences=self._sequences, beams=self._beams)
        return self._submitted

    def admit(self, detached: Ticket, attempt: int) -> Ticket:
        self._length = _length_of(detached)
        order, timeout_ms = self.position.order, self._client.timeout_ms()
        return replace(detached, attempt=attempt, order=order, timeout_ms=timeout_ms)

    def adopt(self, ticket: Ticket) -> tuple[Generated, ...]:
        self._submitted = replace(ticket, holder_id=first_of(ticket.holder_id))
        self.position = QueuePosition.of(ticket.order)
        return ()

    def note(self, ticket: Ticket) -> None:
        """Remember where the search stands, if this says it."""
        if ticket.beams is None or self.problem(ticket, blocks=False):
            return
        self._beams, self._length = ticket.beams, _length_of(ticket)
        self._sequences = tuple(
            TicketSequence(sequence.index, sequence.token_ids) for sequence in ticket.sequences
        )

    def is_progress(self, outputs: Sequence[Generated]) -> bool:
        """What only a worker has is lost with it: steps that are done again are no progress."""
        if any(output.token_ids for output in outputs):
            return True
        self._length += len(outputs)
        was_there = self._length <= self._longest
        self._longest = max(self._longest, self._length)
        return not was_there

    @property
    def is_recomputing(self) -> bool:
        return self._length < self._longest

    def problem_of_prefilled(self, event: Prefilled) -> str:
        """It has begun, or found all that there is."""
        new = [output for output in event.outputs if not self._client.is_over(output.index)]
        if problem := self.problem(event.ticket, new):
            return f"answered with a wrong ticket: {problem}"
        expected = [] if event.ticket.sequences else list(range(self._num_sequences))
        if [output.index for output in event.outputs] != expected:
            return f"found {len(event.outputs)} sequences instead of {len(expected)}"
        return ""

    def problem_of_step(self, event: Generated) -> str:
        """A whole sequence, or the word that the search goes on."""
        if not event.token_ids and event.finish_reason is None:
            return self._problem_of_going_on(event)
        if event.finish_reason is None:
            return "sent a sequence that has not ended"
        if event.score is not None and not math.isfinite(event.score):
            return f"sent a score of {event.score}"
        return super().problem_of_step(event)

    def _problem_of_going_on(self, event: Generated) -> str:
        most = self._client.request.sampling.max_tokens
        if self._length + 1 >= most:
            return f"goes on after {self._length} steps of {most}"
        is_there = self._client.living_sequence(event.index) is not None
        return "" if is_there else "goes on with what was not asked for"

    def problem(
        self, ticket: Ticket, gained: Sequence[Generated] = (), *, blocks: bool = True
    ) -> str:
        if problem := self._problem_of_identity(ticket):
            return problem
        if problem := next(filter(None, map(self.problem_of_step, gained)), ""):
            return problem
        if blocks and not all(sequence.block_ids for sequence in ticket.sequences):
            return "no blocks"
        return self._problem_of_beams(ticket) if ticket.sequences else ""

    def _problem_of_beams(self, ticket: Ticket) -> str:
        """(That sequences and scores belong together is known where it comes in.)"""
        request = self._client.request
        if ticket.beams is None:
            return "no word of its beams"
        num_tokens, most = _length_of(ticket), request.sampling.max_tokens
        if not 0 < num_tokens < most:
            return f"beams of {num_tokens} tokens of {most}"
        tokens = {token for sequence in ticket.sequences for token in sequence.token_ids}
        tokens |= {token for one in ticket.beams.finished for token in one.token_ids}
        if max(tokens) >= request.vocab_size:
            return f"not all tokens are in the vocabulary of {request.vocab_size}"
        return ""


def _length_of(ticket: Ticket) -> int:
    """Beams are of one."""
    return len(ticket.sequences[0].token_ids)
