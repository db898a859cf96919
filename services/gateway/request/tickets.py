"""Builds the tickets of a request, and keeps what workers answer about them (law 7)."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blockstore.records import PrefixHash
from blockstore.store import NO_TENANT
from services.protocol.messages import Generated
from services.protocol.ticket import Swapped, Ticket, TicketSequence, TicketState

if TYPE_CHECKING:
    from services.gateway.request.request import Request


def new_ticket(
    request: "Request",
    attempt: int,
    order: int,
    pool_id: str,
    root_hash: PrefixHash,
    sequences: tuple[TicketSequence, ...] = (),
) -> Ticket:
    """A ticket without blocks, under a new holder. Its worker computes the prompt, and the tokens
    received so far of the `sequences` that have not ended."""
    return Ticket(
        request_id=request.id,
        attempt=attempt,
        order=order,
        pool_id=pool_id,
        holder_id=f"{request.asked.caller.tenant or NO_TENANT}/{secrets.token_hex(16)}",
        holder_epoch=0,
        root_hash=root_hash,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        sequences=sequences,
        adapter=request.adapter,
    )


class Tickets:
    """The tickets of one request, over all its attempts.

    A ticket starts from the tokens that the client has received. The client of a beam search gets
    no token before the end, so the search starts from the beams that a worker returned last; the
    steps that a lost worker has made since then are repeated, with the same result.
    """

    def __init__(self, request: "Request", order: int) -> None:
        self.order = order
        self._request = request
        self._submitted: Ticket | None = None
        self._search: TicketState | None = None
        """The beams of a search, as a worker returned them last."""
        self._num_steps = self._most_steps = 0
        """The steps of the search: those in `_search` and since then, and the most ever made."""

    @property
    def holder_id(self) -> str:
        """The holder of the blocks of the last ticket; empty before the first one."""
        return "" if self._submitted is None else self._submitted.holder_id

    @property
    def is_recomputing(self) -> bool:
        """Whether a search repeats steps that a lost worker had done."""
        return self._num_steps < self._most_steps

    def submit(
        self, attempt: int, pool_id: str, root_hash: PrefixHash, swapped: Swapped | None
    ) -> Ticket:
        """The ticket for a prefill worker."""
        request, search = self._request, self._search
        sequences = tuple(
            TicketSequence(one.index, tuple(one.tokens)) for one in request.output.living
        )
        if request.sampling.beam is not None or not sequences:  # of a search, or of an embedding
            sequences = (TicketSequence(0),) if search is None else search.sequences
        self._submitted = replace(
            new_ticket(request, attempt, self.order, pool_id, root_hash, sequences),
            num_cached_tokens=request.output.stats.num_cached_tokens,
            timeout_ms=request.timeout_ms(),
            traceparent=request.traceparent,
            swapped=swapped,
            beams=None if search is None else search.beams,
        )
        return self._submitted

    def admit(self, detached: Ticket, attempt: int) -> Ticket:
        """The ticket for the decode worker that claims it. That worker gives the blocks of ended
        sequences back."""
        sequences = detached.sequences
        if detached.beams is None:
            living = {sequence.index for sequence in self._request.output.living}
            sequences = tuple(one for one in sequences if one.index in living)
        return replace(
            detached,
            attempt=attempt,
            order=self.order,
            timeout_ms=self._request.timeout_ms(),
            traceparent=self._request.traceparent,
            sequences=sequences,
        )

    def adopt(self, ticket: Ticket) -> tuple[Generated, ...]:
        """Take over the ticket of another gateway, with its queue position. Returns the ticket's
        tokens that the client has not received."""
        self._submitted, self.order = ticket, ticket.order
        self.save_search(ticket.state)
        if ticket.beams is not None:
            return ()
        num_received = {one.index: len(one.tokens) for one in self._request.output.living}
        num_prompt = len(ticket.prompt_token_ids)
        return tuple(
            Generated(*ticket.key, one.index, num_prompt + so_far, one.token_ids[so_far:], None)
            for one in ticket.sequences
            if len(one.token_ids) > (so_far := num_received.get(one.index, len(one.token_ids)))
        )

    def detached(self, state: TicketState, pool_id: str) -> Ticket:
        """The ticket that a worker on this pool has detached."""
        assert self._submitted is not None
        return replace(self._submitted.with_state(state), pool_id=pool_id)

    def problem(self, outputs: Sequence[Generated], state: Ticket | TicketState | None) -> str:
        """Why new tokens, and the state after them, do not continue the tokens that the client has
        received; "" if they do. Only the ticket shows the progress of a beam search."""
        request, living = self._request, self._request.output.living
        running = {sequence.index: sequence for sequence in living}
        num_prompt = len(request.prompt_token_ids)
        gained = {one.index: one for one in outputs if not request.output.is_over(one.index)}
        for index, output in gained.items():
            sequence = running.get(index)
            if sequence is None:
                return f"sent tokens of sequence {index}, which the request does not have"
            num_before = num_prompt + len(sequence.tokens)
            if output.position != num_before:
                return f"repeated or lost tokens: {output.position} after {num_before} tokens"
        if state is None or request.sampling.beam is not None:
            return ""
        returned = {one.index: one.token_ids for one in state.sequences}
        for received in living:
            new = gained.get(received.index)
            tokens = (*received.tokens, *(new.token_ids if new else ()))
            has_ended = new is not None and new.finish_reason is not None
            if not has_ended and returned.get(received.index) != tokens:
                return f"returned a ticket without the tokens of sequence {received.index}"
        return ""

    def save_search(self, state: TicketState | None) -> None:
        """Keep the beams of a search, if a worker returned some."""
        if state is not None and state.beams is not None and state.sequences:
            bare = tuple(TicketSequence(one.index, one.token_ids) for one in state.sequences)
            self._search = replace(state, sequences=bare)
            self._num_steps = len(bare[0].token_ids)

    def is_progress(self, outputs: Sequence[Generated]) -> bool:
        """Whether the request has never had these outputs before. A search reports each step
        without a token."""
        if self._request.sampling.beam is None or any(one.token_ids for one in outputs):
            return bool(outputs)
        self._num_steps += len(outputs)
        is_longer = self._num_steps > self._most_steps
        self._most_steps = max(self._most_steps, self._num_steps)
        return is_longer
