"""Builds the tickets of a request, and keeps what workers answer about them (law 7)."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blockstore.records import PrefixHash
from blockstore.store import NO_TENANT
from services.gateway.request.search import Search
from services.protocol.messages import Generated
from services.protocol.ticket import GroupState, Swapped, Ticket, TicketSequence, TicketState

if TYPE_CHECKING:
    from services.gateway.request.request import Request


def new_ticket(
    request: "Request",
    attempt: int,
    order: int,
    pool_id: str,
    root_hash: PrefixHash,
) -> Ticket:
    """A ticket without blocks and generated tokens, under a new holder."""
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
        adapter=request.adapter,
    )


class Tickets:
    """The tickets of one request, over all its attempts. A ticket starts from the tokens that the
    client has received, or from the state of its search."""

    def __init__(self, request: "Request", order: int) -> None:
        self.order = order
        self._request = request
        self._submitted: Ticket | None = None
        self.search = None if request.sampling.beam is None else Search()

    @property
    def holder_id(self) -> str:
        """The holder of the blocks of the last ticket; empty before the first one."""
        return "" if self._submitted is None else self._submitted.holder_id

    def submit(
        self, attempt: int, pool_id: str, root_hash: PrefixHash, swapped: Swapped | None
    ) -> Ticket:
        """The ticket for a prefill worker."""
        request = self._request
        if self.search is not None:
            state = self.search.state
        else:
            received = (
                TicketSequence(one.index, tuple(one.tokens)) for one in request.output.living
            )
            state = GroupState(tuple(received) or (TicketSequence(0),))  # one for an embedding
        self._submitted = replace(
            new_ticket(request, attempt, self.order, pool_id, root_hash).with_group(state),
            num_cached_tokens=request.output.stats.num_cached_tokens,
            timeout_ms=request.timeout_ms(),
            traceparent=request.traceparent,
            swapped=swapped,
        )
        return self._submitted

    def admit(self, detached: Ticket, attempt: int) -> Ticket:
        """The ticket for the decode worker that claims it. That worker gives the blocks of ended
        sequences back."""
        sequences = detached.sequences
        if self.search is None:
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
        self.note(ticket)
        if self.search is not None:
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
        received; "" if they do. A search is not checked: its client has received nothing."""
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
        if state is None or self.search is not None:
            return ""
        returned = {one.index: one.token_ids for one in state.sequences}
        for received in living:
            new = gained.get(received.index)
            tokens = (*received.tokens, *(new.token_ids if new else ()))
            has_ended = new is not None and new.finish_reason is not None
            if not has_ended and returned.get(received.index) != tokens:
                return f"returned a ticket without the tokens of sequence {received.index}"
        return ""

    def note(self, state: TicketState | None) -> None:
        """Note the state that a worker returned."""
        if self.search is not None and state is not None:
            self.search.save(state)

    def is_progress(self, outputs: Sequence[Generated]) -> bool:
        """Whether the request has never had these outputs before."""
        return bool(outputs) if self.search is None else self.search.is_progress(outputs)
