"""The tickets of a request: made of what its client has received, and held to that when they come
back (law 7)."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from blockstore.store import PrefixHash
from services.common.logprobs import Logprobs
from services.common.ticket import Swapped, Ticket, TicketSequence, first_of
from services.gateway.admission import Admitted
from services.gateway.client import Client
from services.gateway.line import Place
from services.gateway.messages import Generated, Prefilled


def new_ticket(
    request: Admitted,
    attempt: int,
    order: int,
    pool_id: str,
    root_hash: PrefixHash,
    token_ids: tuple[int, ...],
) -> Ticket:
    """Without blocks, under a new holder: to be computed from the prompt and `token_ids`, those
    received so far."""
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
        sequences=(TicketSequence(0, token_ids),),
    )


_OURS = ("request_id", "pool_id", "root_hash", "prompt_token_ids", "sampling")
"""Fields that are the gateway's word: whoever has the ticket goes by them, and changes none."""


def other_field(ticket: Ticket, submitted: Ticket) -> str:
    """The first field of ours in which a ticket is not the one that was submitted; "" if there is
    none."""
    differing = (n for n in _OURS if getattr(ticket, n) != getattr(submitted, n))
    return next(differing, "")


def problem_of(logprobs: Logprobs, num_top: int, vocab_size: int) -> str:
    """Why nobody can have asked for these; "" if somebody can."""
    token_ids = logprobs.top_token_ids
    if len(token_ids) != min(num_top, vocab_size):
        return f"{len(token_ids)} of the {num_top} likeliest tokens"
    if logprobs.rank > vocab_size or any(token_id >= vocab_size for token_id in token_ids):
        return f"not all are in the vocabulary of {vocab_size}"
    return "" if len(set(token_ids)) == len(token_ids) else "a token twice"


def _problem_of_identity(ticket: Ticket, submitted: Ticket) -> str:
    """What makes a ticket another one than was submitted; "" if nothing does."""
    if name := other_field(ticket, submitted):
        return f"another {name}"
    return "" if first_of(ticket.holder_id) == submitted.holder_id else "another holder"


class Tickets:
    """Of one request, over all its attempts. Problems are sentences, "" where there is none."""

    def __init__(self, client: Client, place: Place) -> None:
        self.place = place
        self._client = client
        self._submitted: Ticket | None = None

    def submit(
        self, attempt: int, pool_id: str, root_hash: PrefixHash, swapped: Swapped | None
    ) -> Ticket:
        """For a prefill worker."""
        client, order = self._client, self.place.order
        tokens = tuple(client.tokens)
        self._submitted = replace(
            new_ticket(client.request, attempt, order, pool_id, root_hash, tokens),
            num_cached_tokens=client.output.tally.num_cached_tokens,
            timeout_ms=client.timeout_ms(),
            swapped=swapped,
        )
        return self._submitted

    def admit(self, at_rest: Ticket, attempt: int) -> Ticket:
        """For the decode worker that claims it."""
        order, timeout_ms = self.place.order, self._client.timeout_ms()
        return replace(at_rest, attempt=attempt, order=order, timeout_ms=timeout_ms)

    def adopt(self, ticket: Ticket) -> None:
        """Another gateway has submitted it, at its place in line."""
        self._submitted = replace(ticket, holder_id=first_of(ticket.holder_id))
        self.place = Place.of(ticket.order)

    def problem(self, ticket: Ticket, num_new: int, *, blocks: bool = True) -> str:
        """What is wrong with one that comes back, with `num_new` tokens that the client has not,
        and with `blocks`."""
        submitted, received = self._submitted, tuple(self._client.tokens)
        if submitted is None:
            return "nobody was sent one"
        if blocks and not all(sequence.block_ids for sequence in ticket.sequences):
            return "no blocks"
        if problem := _problem_of_identity(ticket, submitted):
            return problem
        if len(ticket.sequences) != 1 or ticket.sequences[0].index != 0:
            return "other sequences"
        token_ids = ticket.sequences[0].token_ids
        if len(token_ids) != len(received) + num_new or token_ids[: len(received)] != received:
            return f"its tokens are not the {len(received)} received and {num_new} more"
        return self._problem_of_tokens(token_ids[len(received) :], goes_on=blocks)

    def problem_of_prefilled(self, event: Prefilled) -> str:
        """What is wrong with the answer of a prefill worker."""
        ticket, outputs = event.ticket, event.outputs
        if [len(output.token_ids) for output in outputs] != [1]:
            return "not one token of one sequence"
        (output,) = outputs
        problem = self.problem_of_step(output) or self._problem_of_prompt(event.prompt_logprobs)
        if problem:
            return problem
        if output.finish_reason is None:
            at_rest = [sequence.token_ids[-1:] for sequence in ticket.sequences]
            problem = self.problem(ticket, num_new=1)
            return problem or ("" if at_rest == [output.token_ids] else "its tokens are others")
        if self._submitted is None or ticket.sequences:
            return "it goes on after its end"
        return _problem_of_identity(ticket, self._submitted)

    def problem_of_step(self, event: Generated) -> str:
        """What is wrong with tokens that a worker says come next."""
        client = self._client
        if event.index != 0 or not event.token_ids:
            return "sent no token of what was asked for"
        if event.position != client.num_tokens:
            where = f"position {event.position} after {client.num_tokens} tokens"
            return f"repeated or lost tokens: {where}"
        problem = self._problem_of_tokens(event.token_ids, goes_on=event.finish_reason is None)
        if problem:
            return f"sent wrong tokens: {problem}"
        problem = self._problem_of_logprobs(event)
        return problem and f"sent wrong logprobs: {problem}"

    def _problem_of_prompt(self, logprobs: Sequence[Logprobs]) -> str:
        num_prompt = len(self._client.request.prompt_token_ids)
        problem = self._problem(logprobs, num_prompt - 1, self._client.due_prompt_logprobs)
        return problem and f"sent wrong logprobs of the prompt: {problem}"

    def _problem_of_logprobs(self, event: Generated) -> str:
        num_top = self._client.request.sampling.logprobs
        return self._problem(event.logprobs, len(event.token_ids), num_top)

    def _problem(self, logprobs: Sequence[Logprobs], number: int, num_top: int | None) -> str:
        """`num_top`: None: there should be none."""
        wanted = 0 if num_top is None else number
        if len(logprobs) != wanted:
            return f"{len(logprobs)} for {wanted} tokens"
        vocab_size = self._client.request.vocab_size
        problems = (problem_of(each, num_top or 0, vocab_size) for each in logprobs)
        return next(filter(None, problems), "")

    def _problem_of_tokens(self, new: tuple[int, ...], *, goes_on: bool) -> str:
        request = self._client.request
        num_tokens, most = len(self._client.tokens) + len(new), request.sampling.max_tokens
        if any(token_id >= request.vocab_size for token_id in new):
            return f"not all are in the vocabulary of {request.vocab_size}"
        if num_tokens > most or (num_tokens == most and goes_on):
            return f"{num_tokens} of {most}" + (", and no end" if goes_on else "")
        return ""
