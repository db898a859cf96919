"""Requests of several sequences on their way through the workers of a `WorkerPair`."""

from services.protocol.messages import Generated, Prefilled
from services.protocol.ticket import Ticket

from .conftest import WorkerPair
from .fakes import FakeSession
from .runs import outputs


def of_each(session: FakeSession, request_id: str = "r1") -> dict[int, list[Generated]]:
    found: dict[int, list[Generated]] = {}
    for output in outputs(session, request_id):
        found.setdefault(output.index, []).append(output)
    return found


def tokens(session: FakeSession, issued: Ticket) -> dict[int, list[int]]:
    """The client's tokens of each issued sequence."""
    drawn = of_each(session, issued.request_id)
    return {
        state.index: [
            *state.token_ids,
            *(output.token_ids[0] for output in drawn.get(state.index, ())),
        ]
        for state in issued.sequences
    }


def ended(session: FakeSession, request_id: str = "r1") -> set[int]:
    return {output.index for output in outputs(session, request_id) if output.finish_reason}


async def answer(pair: WorkerPair, wanted: Ticket) -> Prefilled:
    session = FakeSession()
    pair.prefill.role.submit(session, wanted)
    await pair.until(lambda: bool(session.of(Prefilled)))
    (event,) = session.of(Prefilled)
    assert isinstance(event, Prefilled)
    return event


async def num_held(pair: WorkerPair) -> int:
    await pair.decode.writer.flush()
    (holder,) = await pair.store.holders("pool")
    return holder.num_blocks
