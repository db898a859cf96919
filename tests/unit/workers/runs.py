"""Requests on their way through the workers of a `Bench`, and what their client has."""

from services.protocol.ticket import Ticket
from services.worker.events import Output, Prefilled, Step

from .conftest import Bench
from .fakes import FakeSession


async def prefill(bench: Bench, asked: Ticket) -> Ticket:
    """The ticket as the prefill worker issues it."""
    session = FakeSession()
    bench.prefill.submit(session, asked)
    await bench.until(lambda: bool(session.of(Prefilled)))
    ticket: Ticket = session.of(Prefilled)[0].ticket
    return ticket


async def start(bench: Bench, asked: Ticket) -> Ticket:
    issued = await prefill(bench, asked)
    bench.decode.reserve(bench.session, *issued.key, 1)
    bench.decode.admit(bench.session, issued)
    return issued


def outputs(session: FakeSession, request_id: str) -> list[Output]:
    steps = [output for step in session.of(Step) for output in step.outputs]
    return [output for output in steps if output.request_id == request_id]


def tokens(session: FakeSession, issued: Ticket) -> list[int]:
    """What a client has: the prefill worker's token and the decode worker's."""
    drawn = [output.token_id for output in outputs(session, issued.request_id)]
    return [*issued.sequences[0].token_ids, *drawn]


def finished(session: FakeSession, request_id: str) -> bool:
    return any(output.finish for output in outputs(session, request_id))


def prefilled(session: FakeSession) -> dict[str, Prefilled]:
    """What came back from prefill, by request."""
    return {event.ticket.request_id: event for event in session.of(Prefilled)}
