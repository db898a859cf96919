"""Fake workers with beam search. The beams of a search do not compete: beam i has the tokens of
sequence i, and the first one is the answer. So a gateway that loses or mixes up beams gives a wrong
answer."""

import asyncio
from dataclasses import dataclass
from typing import Any

from quire.v1 import decode_pb2, prefill_pb2, sampling_pb2, ticket_pb2, worker_pb2
from tests.integration.gateway.fakes import FakeDecode, FakePrefill, Session
from tests.integration.gateway.fakes.model import next_token, state_of


def _searches(ticket: ticket_pb2.Ticket) -> bool:
    return ticket.sampling.HasField("beam")


def score_of(index: int, length: int) -> float:
    return -1.0 - index * length


def _step(ticket: ticket_pb2.Ticket) -> None:
    """One token more for each beam."""
    begun = [list(one.token_ids) for one in ticket.sequences]
    length = 1 + len(begun[0])
    prompt, width = list(ticket.prompt_token_ids), ticket.sampling.beam.width
    ticket.ClearField("sequences")
    for index in range(width):
        tokens = begun[min(index, len(begun) - 1)]
        tokens = [*tokens, next_token([*prompt, *tokens], index)]
        num_computed = len(prompt) + len(tokens) - 1
        ticket.sequences.add(
            index=index, token_ids=tokens, block_ids=[index], num_computed_tokens=num_computed
        )
    ticket.beams.ClearField("scores")
    ticket.beams.scores.extend(score_of(index, length) for index in range(width))


def _found(ticket: ticket_pb2.Ticket) -> list[worker_pb2.SequenceOutput]:
    """The result of a finished search; else nothing."""
    if len(ticket.sequences[0].token_ids) < ticket.sampling.max_tokens:
        return []
    return [
        worker_pb2.SequenceOutput(
            request_id=ticket.request_id,
            attempt=ticket.attempt,
            index=one.index,
            position=len(ticket.prompt_token_ids),
            token_ids=one.token_ids,
            finish_reason=sampling_pb2.FINISH_REASON_LENGTH,
            score=score_of(one.index, ticket.sampling.max_tokens),
        )
        for one in ticket.sequences[: ticket.sampling.n]
    ]


class SearchingPrefill(FakePrefill):
    def answer(self, session: Session, submitted: ticket_pb2.Ticket) -> None:
        if not _searches(submitted):
            super().answer(session, submitted)
            return
        ticket = ticket_pb2.Ticket()
        ticket.CopyFrom(submitted)
        ticket.holder_epoch = 2
        _step(ticket)
        outputs = _found(ticket)
        if outputs:
            ticket.ClearField("sequences")
            ticket.ClearField("beams")
        session.send(prefilled=prefill_pb2.Prefilled(ticket=state_of(ticket), outputs=outputs))


@dataclass(eq=False)
class _Search:
    session: Session
    ticket: ticket_pb2.Ticket


class SearchingDecode(FakeDecode):
    """`searches`: by request."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.searches: dict[str, _Search] = {}
        self._searching: asyncio.Task[None] | None = None

    def on_admit(self, session: Session, admit: decode_pb2.Admit) -> None:
        ticket = admit.ticket
        if not _searches(ticket):
            super().on_admit(session, admit)
            return
        self.check_slots((ticket.request_id, ticket.attempt), ticket.sampling.beam.width)
        self.begin(session, admit, lambda: self._search(session, ticket))

    def on_abort(self, session: Session, abort: worker_pb2.Abort) -> None:
        super().on_abort(session, abort)
        search = self.searches.get(abort.request_id)
        if search and not abort.HasField("index") and search.ticket.attempt == abort.attempt:
            del self.searches[abort.request_id]

    def on_hand_over(self, session: Session, command: decode_pb2.HandOver) -> None:
        search = self.searches.pop(command.request_id, None)
        if search is None:
            super().on_hand_over(session, command)
            return
        self._forget(search)
        search.ticket.holder_epoch += 2
        self.at_rest[command.request_id] = session, state_of(search.ticket)
        reason = worker_pb2.Requeue.REASON_HANDED_OVER
        session.send(requeue=worker_pb2.Requeue(ticket=state_of(search.ticket), reason=reason))

    def on_closed(self, session: Session) -> None:
        super().on_closed(session)
        self.searches = {k: one for k, one in self.searches.items() if one.session is not session}

    def _search(self, session: Session, ticket: ticket_pb2.Ticket) -> None:
        own = ticket_pb2.Ticket()
        own.CopyFrom(ticket)
        self.searches[ticket.request_id] = _Search(session, own)
        if self._searching is None or self._searching.done():
            self._searching = asyncio.create_task(self._search_on())

    async def _search_on(self) -> None:
        while self.searches:
            for request_id, search in tuple(self.searches.items()):
                _step(search.ticket)
                outputs = _found(search.ticket)
                if outputs:
                    del self.searches[request_id]
                    self._forget(search)
                search.session.send(
                    step=decode_pb2.StepOutput(outputs=outputs or [_going_on(search.ticket)])
                )
            await asyncio.sleep(0)

    def _forget(self, search: _Search) -> None:
        self.slots.pop((search.ticket.request_id, search.ticket.attempt), None)


def _going_on(ticket: ticket_pb2.Ticket) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(
        request_id=ticket.request_id, attempt=ticket.attempt, position=len(ticket.prompt_token_ids)
    )
