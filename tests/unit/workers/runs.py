"""Requests on their way through the workers of a `WorkerPair`, and their clients' tokens."""

from prometheus_client import Counter

from services.protocol.messages import Generated, Prefilled, Step
from services.protocol.ticket import Ticket

from .conftest import WorkerPair
from .fakes import FakeSession


async def prefill(pair: WorkerPair, asked: Ticket) -> Ticket:
    """The ticket as the prefill worker issues it."""
    session = FakeSession()
    pair.prefill.role.submit(session, asked)
    await pair.until(lambda: bool(session.of(Prefilled)))
    ticket: Ticket = session.of(Prefilled)[0].ticket
    return ticket


def admit(pair: WorkerPair, issued: Ticket) -> None:
    pair.decode.role.reserve(pair.session, *issued.key, issued.width)
    pair.decode.role.admit(pair.session, issued)


async def start(pair: WorkerPair, wanted: Ticket) -> Ticket:
    issued = await prefill(pair, wanted)
    admit(pair, issued)
    return issued


def outputs(session: FakeSession, request_id: str) -> list[Generated]:
    steps = [output for step in session.of(Step) for output in step.outputs]
    return [output for output in steps if output.request_id == request_id]


def tokens(session: FakeSession, issued: Ticket) -> list[int]:
    """The client's tokens: the prefill worker's and the decode worker's."""
    drawn = [output.token_ids[0] for output in outputs(session, issued.request_id)]
    return [*issued.sequences[0].token_ids, *drawn]


def finished(session: FakeSession, request_id: str) -> bool:
    return any(output.finish_reason for output in outputs(session, request_id))


def prefilled(session: FakeSession) -> dict[str, Prefilled]:
    """The tickets from prefill, by request."""
    return {event.ticket.request_id: event for event in session.of(Prefilled)}


def count(counter: Counter) -> float:
    """The value of a counter without labels."""
    (family,) = counter.collect()
    return family.samples[0].value
