"""Builds the tickets of a request from the tokens that its client has received, and checks returned
tickets against these tokens (law 7).
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from blockstore.records import PrefixHash
from services.gateway.intake.admission import AdmittedRequest
from services.gateway.scheduling.request_queue import QueuePosition
from services.gateway.streaming.client import Client
from services.gateway.streaming.output import Output
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Generated, Prefilled
from services.protocol.ticket import FinishReason, Swapped, Ticket, TicketSequence, first_holder_id


def ticket_sequences(output: Output) -> tuple[TicketSequence, ...]:
    """The sequences that have not ended, each with the tokens that the client has received."""
    return tuple(TicketSequence(each.index, tuple(each.tokens)) for each in output.living)


def new_ticket(
    request: AdmittedRequest,
    attempt: int,
    order: int,
    pool_id: str,
    root_hash: PrefixHash,
    sequences: tuple[TicketSequence, ...],
) -> Ticket:
    """A ticket without blocks, under a new holder. Its worker computes the prompt, and the tokens
    received so far of the `sequences` that have not ended."""
    return Ticket(
        request_id=request.request_id,
        attempt=attempt,
        order=order,
        pool_id=pool_id,
        holder_id=secrets.token_hex(16),
        holder_epoch=0,
        root_hash=root_hash,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        sequences=sequences,
        adapter=request.adapter,
    )


_FIXED_FIELDS = ("request_id", "pool_id", "root_hash", "prompt_token_ids", "sampling", "adapter")
"""The fields that the gateway sets and that no worker changes."""


def changed_field(ticket: Ticket, submitted: Ticket) -> str:
    """The first fixed field in which a ticket differs from the submitted one; "" if none does."""
    changed = (n for n in _FIXED_FIELDS if getattr(ticket, n) != getattr(submitted, n))
    return next(changed, "")


def logprobs_problem(logprobs: Logprobs, num_top: int, vocab_size: int) -> str:
    """Why these logprobs do not answer a request for `num_top` of them; "" if they do."""
    token_ids = logprobs.top_token_ids
    if len(token_ids) != min(num_top, vocab_size):
        return f"{len(token_ids)} of the {num_top} likeliest tokens"
    if logprobs.rank > vocab_size or any(token_id >= vocab_size for token_id in token_ids):
        return f"not all are in the vocabulary of {vocab_size}"
    return "" if len(set(token_ids)) == len(token_ids) else "a token twice"


def is_same_request(ticket: Ticket, wanted: Ticket) -> bool:
    """Whether a parked ticket belongs to the request of the `wanted` ticket. A greedy request may
    have another seed, which the other gateway drew."""
    if not ticket.sampling.samples_like(wanted.sampling):
        return False
    return not changed_field(replace(ticket, sampling=wanted.sampling), wanted)


class Tickets:
    """The tickets of one request, over all its attempts. Methods that check return the problem as a
    text, "" if there is none."""

    def __init__(self, client: Client, position: QueuePosition) -> None:
        self.position = position
        self._client = client
        self._submitted: Ticket | None = None

    @property
    def holder_id(self) -> str:
        """The holder of the blocks of the last submitted ticket; "": none was submitted."""
        return "" if self._submitted is None else self._submitted.holder_id

    # ── build ─────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, attempt: int, pool_id: str, root_hash: PrefixHash, swapped: Swapped | None
    ) -> Ticket:
        """The ticket for a prefill worker."""
        client, order = self._client, self.position.order
        sequences = ticket_sequences(client.output)
        self._submitted = replace(
            new_ticket(client.request, attempt, order, pool_id, root_hash, sequences),
            num_cached_tokens=client.output.stats.num_cached_tokens,
            timeout_ms=client.timeout_ms(),
            swapped=swapped,
        )
        return self._submitted

    def admit(self, detached: Ticket, attempt: int) -> Ticket:
        """The ticket for the decode worker that claims it. That worker gives the blocks of ended
        sequences back."""
        living = {sequence.index for sequence in self._client.living}
        return replace(
            detached,
            attempt=attempt,
            order=self.position.order,
            timeout_ms=self._client.timeout_ms(),
            sequences=tuple(s for s in detached.sequences if s.index in living),
        )

    def adopt(self, ticket: Ticket) -> tuple[Generated, ...]:
        """Take over the ticket of another gateway, with its queue position. Returns the ticket's
        tokens that the client has not received."""
        self._submitted = replace(ticket, holder_id=first_holder_id(ticket.holder_id))
        self.position = QueuePosition.of(ticket.order)
        num_received = {s.index: len(s.tokens) for s in self._client.living}
        num_prompt = len(ticket.prompt_token_ids)
        return tuple(
            Generated(*ticket.key, s.index, num_prompt + so_far, s.token_ids[so_far:], None)
            for s in ticket.sequences
            if len(s.token_ids) > (so_far := num_received.get(s.index, len(s.token_ids)))
        )

    # ── check ─────────────────────────────────────────────────────────────────────────────────────

    def problem_of_prefilled(self, event: Prefilled) -> str:
        """Check the answer of a prefill worker."""
        living = [sequence.index for sequence in self._client.living]
        if sorted(output.index for output in event.outputs) != living:
            return "sent outputs of other sequences"
        for output in event.outputs:
            if len(output.token_ids) != 1 or output.key != event.ticket.key:
                return "sent no first token of the ticket"
        if problem := self._problem_of_prompt(event.prompt_logprobs):
            return problem
        if problem := self.problem_of_ticket(event.ticket, event.outputs):
            return f"answered with a wrong ticket: {problem}"
        num_going_on = sum(output.finish_reason is None for output in event.outputs)
        return "continues an ended sequence" if len(event.ticket.sequences) != num_going_on else ""

    def problem_of_step(self, event: Generated) -> str:
        """Check the next tokens of a sequence."""
        client = self._client
        sequence = client.living_sequence(event.index)
        if sequence is None or not event.token_ids:
            return "sent no token of a running sequence"
        num_before = len(client.request.prompt_token_ids) + len(sequence.tokens)
        if event.position != num_before:
            where = f"position {event.position} after {num_before} tokens"
            return f"repeated or lost tokens: {where}"
        request = client.request
        num_tokens = len(sequence.tokens) + len(event.token_ids)
        most, goes_on = request.sampling.max_tokens, event.finish_reason is None
        if any(token_id >= request.vocab_size for token_id in event.token_ids):
            return f"sent wrong tokens: not all are in the vocabulary of {request.vocab_size}"
        if (event.score is not None) != (request.sampling.beam is not None):
            return f"sent a score of {event.score}"
        if num_tokens > most or (num_tokens == most and goes_on):
            return f"sent wrong tokens: {num_tokens} of {most}" + (", and no end" * goes_on)
        num_top = request.sampling.logprobs
        problem = self._problem_of_logprobs(event.logprobs, len(event.token_ids), num_top)
        return problem and f"sent wrong logprobs: {problem}"

    def problem_of_ticket(
        self, ticket: Ticket, gained: Sequence[Generated] = (), *, blocks: bool = True
    ) -> str:
        """Check a returned ticket: it has the tokens of the client and `gained`, and blocks if it
        must have `blocks`. It may also have sequences that have ended for the client."""
        if problem := self._problem_of_identity(ticket):
            return problem
        if problem := next(filter(None, map(self.problem_of_step, gained)), ""):
            return problem
        return self._problem_of_sequences(ticket, gained, blocks)

    def _problem_of_sequences(
        self, ticket: Ticket, gained: Sequence[Generated], blocks: bool
    ) -> str:
        new = {output.index: output for output in gained}
        returned = {sequence.index: sequence for sequence in ticket.sequences}
        for received in self._client.living:
            index, output = received.index, new.get(received.index)
            if output is not None and output.finish_reason is not None:
                continue
            if index not in returned:
                return f"sequence {index} is not in it"
            tokens = (*received.tokens, *(output.token_ids if output else ()))
            if returned[index].token_ids != tokens:
                return f"the tokens of sequence {index} are not those that were sent"
            if blocks and not returned[index].block_ids:
                return "no blocks"
        return "" if all(index < self._num_sequences for index in returned) else "other sequences"

    def problem_of_moved(self, ticket: Ticket, pool_id: str) -> str:
        """Check a ticket that was copied to another pool, where the request goes on."""
        if self._submitted is not None:
            self._submitted = replace(self._submitted, pool_id=pool_id)
        return self.problem_of_ticket(ticket)

    def save_progress(self, ticket: Ticket) -> None:
        """Keep what a returned ticket has and the client has not: nothing, except in a beam
        search."""

    def is_progress(self, outputs: Sequence[Generated]) -> bool:
        """Whether the request has never had these outputs before."""
        return bool(outputs)

    @property
    def is_recomputing(self) -> bool:
        """Whether the request repeats steps that a lost worker had done."""
        return False

    def _problem_of_identity(self, ticket: Ticket) -> str:
        submitted = self._submitted
        if submitted is None:
            return "no ticket was submitted"
        if name := changed_field(ticket, submitted):
            return f"another {name}"
        return "" if first_holder_id(ticket.holder_id) == submitted.holder_id else "another holder"

    def _problem_of_prompt(self, logprobs: Sequence[Logprobs]) -> str:
        num_prompt = len(self._client.request.prompt_token_ids)
        num_top = self._client.unsent_prompt_logprobs
        problem = self._problem_of_logprobs(logprobs, num_prompt - 1, num_top)
        return problem and f"sent wrong logprobs of the prompt: {problem}"

    def _problem_of_logprobs(
        self, logprobs: Sequence[Logprobs], number: int, num_top: int | None
    ) -> str:
        """`num_top`: the logprobs that were asked for with each token; None: none."""
        wanted = 0 if num_top is None else number
        if len(logprobs) != wanted:
            return f"{len(logprobs)} for {wanted} tokens"
        vocab_size = self._client.request.vocab_size
        problems = (logprobs_problem(each, num_top or 0, vocab_size) for each in logprobs)
        return next(filter(None, problems), "")

    @property
    def _num_sequences(self) -> int:
        return self._client.request.num_sequences


class EmbeddingTickets(Tickets):
    """Checks the answer to a request for an embedding, which ends with its prefill."""

    def problem_of_prefilled(self, event: Prefilled) -> str:
        pooling = self._client.request.sampling.pooling
        assert pooling is not None
        if len(event.outputs) != 1 or event.outputs[0].key != event.ticket.key:
            return "sent no embedding of the ticket"
        output = event.outputs[0]
        if output.index or output.token_ids or output.finish_reason is not FinishReason.STOP:
            return "sent tokens instead of an embedding"
        if len(output.embedding) != pooling.dimensions:
            return f"sent {len(output.embedding)} of {pooling.dimensions} dimensions"
        if problem := self._problem_of_identity(event.ticket):
            return f"answered with a wrong ticket: {problem}"
        return "continues an ended sequence" if event.ticket.sequences else ""
