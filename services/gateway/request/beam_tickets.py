"""Builds and checks the tickets of a beam search. The client gets no token before the end, so the
checks cannot compare tokens, and only the tickets show the progress of the search.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from blockstore.records import PrefixHash
from services.gateway.request.tickets import Tickets
from services.gateway.scheduling.request_queue import QueuePosition
from services.gateway.streaming.client import Client
from services.protocol.messages import Generated, Prefilled
from services.protocol.ticket import BeamState, Swapped, Ticket, TicketSequence, first_holder_id


class BeamTickets(Tickets):
    """The next ticket continues from the last returned one. A lost worker's steps since then are
    repeated, with the same result."""

    def __init__(self, client: Client, position: QueuePosition) -> None:
        super().__init__(client, position)
        self._beams: BeamState | None = None
        self._sequences: tuple[TicketSequence, ...] = (TicketSequence(0),)
        self._length = 0
        """Tokens of each beam: those in the last ticket, and one for each step since."""
        self._max_length = 0

    def submit(
        self, attempt: int, pool_id: str, root_hash: PrefixHash, swapped: Swapped | None
    ) -> Ticket:
        ticket = super().submit(attempt, pool_id, root_hash, swapped)
        self._submitted = replace(ticket, sequences=self._sequences, beams=self._beams)
        return self._submitted

    def admit(self, detached: Ticket, attempt: int) -> Ticket:
        self._length = _length_of(detached)
        return replace(super().admit(detached, attempt), sequences=detached.sequences)

    def adopt(self, ticket: Ticket) -> tuple[Generated, ...]:
        self._submitted = replace(ticket, holder_id=first_holder_id(ticket.holder_id))
        self.position = QueuePosition.of(ticket.order)
        return ()

    def save_progress(self, ticket: Ticket) -> None:
        """Keep the beams of a returned ticket."""
        if ticket.beams is None or self.problem_of_ticket(ticket, blocks=False):
            return
        self._beams, self._length = ticket.beams, _length_of(ticket)
        self._sequences = tuple(
            TicketSequence(sequence.index, sequence.token_ids) for sequence in ticket.sequences
        )

    def is_progress(self, outputs: Sequence[Generated]) -> bool:
        """See `Tickets.is_progress`. Repeated steps are no progress."""
        if any(output.token_ids for output in outputs):
            return True
        self._length += len(outputs)
        is_longer = self._length > self._max_length
        self._max_length = max(self._max_length, self._length)
        return is_longer

    @property
    def is_recomputing(self) -> bool:
        return self._length < self._max_length

    def problem_of_prefilled(self, event: Prefilled) -> str:
        """Check that the search has begun, or has found all hypotheses."""
        new = [output for output in event.outputs if not self._client.is_over(output.index)]
        if problem := self.problem_of_ticket(event.ticket, new):
            return f"answered with a wrong ticket: {problem}"
        expected = [] if event.ticket.sequences else list(range(self._num_sequences))
        if [output.index for output in event.outputs] != expected:
            return f"found {len(event.outputs)} sequences instead of {len(expected)}"
        return ""

    def problem_of_step(self, event: Generated) -> str:
        """Check a hypothesis, or the report of a step."""
        if not event.token_ids and event.finish_reason is None:
            return self._problem_of_report(event)
        if event.finish_reason is None:
            return "sent a sequence that has not ended"
        if event.score is not None and not math.isfinite(event.score):
            return f"sent a score of {event.score}"
        return super().problem_of_step(event)

    def _problem_of_report(self, event: Generated) -> str:
        most = self._client.request.sampling.max_tokens
        if self._length + 1 >= most:
            return f"goes on after {self._length} steps of {most}"
        is_living = self._client.living_sequence(event.index) is not None
        return "" if is_living else "continues a sequence that is not running"

    def _problem_of_sequences(
        self, ticket: Ticket, gained: Sequence[Generated], blocks: bool
    ) -> str:
        if blocks and not all(sequence.block_ids for sequence in ticket.sequences):
            return "no blocks"
        return self._problem_of_beams(ticket) if ticket.sequences else ""

    def _problem_of_beams(self, ticket: Ticket) -> str:
        """Check the beams. (The codec checks that sequences and scores match.)"""
        request = self._client.request
        if ticket.beams is None:
            return "no state of its beams"
        num_tokens, most = _length_of(ticket), request.sampling.max_tokens
        if not 0 < num_tokens < most:
            return f"beams of {num_tokens} tokens of {most}"
        tokens = {token for sequence in ticket.sequences for token in sequence.token_ids}
        tokens |= {token for hypothesis in ticket.beams.finished for token in hypothesis.token_ids}
        if max(tokens) >= request.vocab_size:
            return f"not all tokens are in the vocabulary of {request.vocab_size}"
        return ""


def _length_of(ticket: Ticket) -> int:
    """The number of tokens of each beam; all beams have the same."""
    return len(ticket.sequences[0].token_ids)
