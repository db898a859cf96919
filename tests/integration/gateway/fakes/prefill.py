"""A prefill worker that computes nothing."""

from typing import Any, ClassVar

from grpc import aio

from blockstore.registry import Role
from quire.v1 import prefill_pb2, prefill_pb2_grpc, sampling_pb2, ticket_pb2, worker_pb2

from .model import logprobs_of, next_token, state_of, told
from .worker import FakeWorker, Session


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """Answers at once, or keeps tickets in `held` while `holds`. `num_cached`: how many cached
    tokens it reports for every prompt."""

    role: ClassVar[Role] = "prefill"
    service = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

    def __init__(self, worker_id: str = "prefill-1", **fields: Any) -> None:
        super().__init__(worker_id, **fields)
        self.holds = False
        self.held: list[tuple[Session, ticket_pb2.Ticket]] = []
        self.prompt_logprobs: dict[str, int] = {}
        self.num_cached = 0

    @property
    def submitted(self) -> list[ticket_pb2.Ticket]:
        return [submit.ticket for submit in self.commands(prefill_pb2.PrefillSubmit)]

    def register(self, server: aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Connect(self, request_iterator: Any, context: Any) -> Any:
        async for response in self.serve(request_iterator, prefill_pb2.PrefillConnectResponse):
            yield response

    def on_submit(self, session: Session, submit: prefill_pb2.PrefillSubmit) -> None:
        self.prompt_logprobs.pop(submit.ticket.request_id, None)
        if submit.HasField("prompt_logprobs"):
            self.prompt_logprobs[submit.ticket.request_id] = submit.prompt_logprobs
        self.begin(session, submit, lambda: self._compute(session, submit.ticket))

    def _compute(self, session: Session, ticket: ticket_pb2.Ticket) -> None:
        if self.holds:
            self.held.append((session, ticket))
        else:
            self.answer(session, ticket)

    def let_go(self) -> None:
        self.holds = False
        while self.held:
            self.answer(*self.held.pop(0))

    def answer(self, session: Session, submitted: ticket_pb2.Ticket) -> None:
        ticket = ticket_pb2.Ticket()
        ticket.CopyFrom(submitted)
        if not any(sequence.token_ids for sequence in submitted.sequences):
            ticket.num_cached_tokens = self.num_cached
        ticket.holder_epoch = 2
        del ticket.sequences[:]
        outputs = [self._first_token(ticket, sequence) for sequence in submitted.sequences]
        prefilled = prefill_pb2.Prefilled(ticket=state_of(ticket), outputs=outputs)
        prompt = ticket.prompt_token_ids
        num_top = self.prompt_logprobs.get(ticket.request_id)
        for end in range(2, len(prompt) + 1):
            if num_top is None:
                break
            one, columns = logprobs_of(prompt[:end], num_top), prefilled.prompt_logprob_columns
            columns.logprobs.append(one.logprob)
            columns.ranks.append(one.rank)
            columns.top_token_ids.extend(one.top_token_ids)
            columns.top_logprobs.extend(one.top_logprobs)
        session.send(prefilled=prefilled)

    def _first_token(
        self, ticket: ticket_pb2.Ticket, submitted: ticket_pb2.TicketSequence
    ) -> worker_pb2.SequenceOutput:
        """Add the first token; the sequence stays in the ticket unless it ends with it."""
        tokens = [*ticket.prompt_token_ids, *submitted.token_ids]
        token = next_token(tokens, submitted.index)
        output = worker_pb2.SequenceOutput(
            request_id=ticket.request_id,
            attempt=ticket.attempt,
            index=submitted.index,
            position=len(tokens),
            token_ids=[token],
            logprobs=told([*tokens, token], ticket.sampling),
        )
        if len(submitted.token_ids) + 1 == ticket.sampling.max_tokens:
            output.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        else:
            ticket.sequences.add(
                index=submitted.index,
                token_ids=[*submitted.token_ids, *output.token_ids],
                block_ids=range(len(tokens) // 16 + 1),
                num_computed_tokens=len(tokens),
            )
        return output
