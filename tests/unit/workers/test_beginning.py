"""A gateway is told that its request begins before it is computed."""

from services.protocol.messages import Prefilled
from services.protocol.ticket import Ticket
from services.worker.requests.jobs import State

from .conftest import WorkerPair
from .fakes import PROMPT, FakeSession, expected, ticket
from .runs import finished, prefill, tokens


async def admit(pair: WorkerPair, session: FakeSession, number: int) -> Ticket:
    """A request with a slot, and a ticket that the decode worker has claimed."""
    asked = ticket(f"r{number}", range(100 * number, 100 * number + 10), max_tokens=4)
    issued = await prefill(pair, asked)
    pair.decode.role.reserve(session, *issued.key, 1)
    pair.decode.role.admit(session, issued)
    job = pair.decode.role.jobs.get(session, *issued.key)
    assert job is not None
    await pair.until(lambda: job.state is not State.CLAIMING)
    return issued


async def test_no_sequence_is_computed_before_its_gateway_knows(pair: WorkerPair) -> None:
    """So whatever a step does to its worker, the gateway knows the requests in it."""
    session = FakeSession()
    session.reads = False
    pair.prefill.role.submit(session, ticket("r1", PROMPT))
    await pair.until(lambda: session.began == ["r1"])
    other = FakeSession()
    pair.prefill.role.submit(other, ticket("r2", (1, 2, 3)))
    await pair.until(lambda: bool(other.of(Prefilled)))  # a step has run meanwhile
    assert pair.arena.num_computed == 3
    assert not session.events
    session.read()
    await pair.until(lambda: bool(session.of(Prefilled)))
    assert pair.arena.num_computed == 13


async def test_no_sequence_is_decoded_before_its_gateway_knows(pair: WorkerPair) -> None:
    session = FakeSession()
    session.reads = False
    issued = await admit(pair, session, 1)
    await pair.until(lambda: session.began == ["r1"])
    other = FakeSession()
    await admit(pair, other, 2)
    await pair.until(lambda: finished(other, "r2"))
    assert tokens(session, issued) == [*issued.sequences[0].token_ids]
    session.reads = True
    session.read()
    await pair.until(lambda: finished(session, "r1"))
    assert tokens(session, issued) == expected(issued.prompt_token_ids, 4)
    await pair.until_empty()


async def test_a_sequence_waiting_for_a_lost_store_has_not_begun(pair: WorkerPair) -> None:
    """Neither has one that finds no blocks."""
    session = FakeSession()
    filler = await pair.store.allocate("pool", "filler", pair.prefill.worker_id, 1, (), 30)
    pair.prefill.role.submit(session, ticket("r2", PROMPT))
    await pair.until(lambda: bool(pair.store.ledger("pool").stats().num_waiters))
    assert not session.began
    await pair.store.release("pool", "filler", filler.epoch)
    await pair.until(lambda: session.began == ["r2"])
