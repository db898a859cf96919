"""Checks the answer to a request for an embedding, which ends with its prefill."""

from services.gateway.request.tickets import Tickets
from services.protocol.messages import Prefilled
from services.protocol.ticket import FinishReason


class EmbeddingTickets(Tickets):
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
