"""A request that was swapped out waits in the queue, and goes through prefill with its KV in the
swap pool."""

from dataclasses import replace

from services.gateway.request.status import RequestStatus
from services.protocol.messages import Abort, Requeued, RequeueReason, Reserve, Submit
from services.protocol.ticket import Swapped, SwappedTable, Ticket, TicketSequence

from .test_gateway_beams import begun, searching, until_searching
from .walk import MAX_TOKENS, ScriptedWorker, Walk, expected, step

SWAPPED = Swapped("colder", "h", 2, (SwappedTable(0, (4, 5)),))


def swapped_out(walk: Walk, ticket: Ticket, num_tokens: int = 2) -> Requeued:
    sequence = TicketSequence(0, tuple(expected(num_tokens)))
    attempt = walk.request.attempt.number
    given = replace(ticket, attempt=attempt, sequences=(sequence,), swapped=SWAPPED)
    return Requeued("r1", attempt, RequeueReason.PREEMPTED, given)


async def waiting(walk: Walk) -> ScriptedWorker:
    """A request that was swapped out after two tokens, and the decode worker that keeps it."""
    ticket = await walk.until_decoding()
    step(walk, 0)
    walk.on_event(walk.decode, swapped_out(walk, ticket))
    assert walk.request.status is RequestStatus.QUEUED
    assert walk.decode.num_taken_slots == 0
    issuer, walk.decode = walk.decode, ScriptedWorker("next")
    return issuer


async def test_a_prefill_worker_that_gives_it_back_leaves_it_where_it_was() -> None:
    """Only a worker that claims it there knows whether it still is there."""
    walk = Walk()
    issuer = await waiting(walk)
    await walk.until_prefilling()
    given_back = walk.request.attempt.number
    walk.on_event(walk.prefill, Requeued("r1", given_back, RequeueReason.DRAINING))
    assert await walk.reserve()
    walk.prefill.draining = False
    assert walk.start().swapped == SWAPPED
    assert not [command for command in issuer.sent if isinstance(command, Abort)]
    assert Abort("r1", given_back) not in walk.prefill.sent
    walk.request.close()
    assert issuer.sent[-1] == Abort("r1", 1)


async def test_a_parked_ticket_that_does_not_continue_the_request_is_refused() -> None:
    walk = Walk()
    ticket = await walk.until_decoding()
    walk.on_event(walk.decode, swapped_out(walk, ticket, num_tokens=3))
    assert walk.request.attempt.detached is None
    assert Abort("r1", 1) in walk.decode.sent
    assert [c for c in walk.prefill.sent if isinstance(c, Submit)] != []
    walk.request.close()


async def test_a_group_comes_back_with_those_that_go_on() -> None:
    """Sequence 1 had ended for its client before the group was swapped out."""
    walk = Walk(num_sequences=3)
    ticket = await walk.until_decoding()
    step(walk, 0, 2)
    step(walk, 1, MAX_TOKENS - 1)
    there = Swapped("colder", "h", 2, tuple(SwappedTable(i, (1, 2 + i)) for i in range(3)))
    states = tuple(TicketSequence(i, tuple(walk.output.sequences[i].tokens)) for i in range(3))
    given = replace(ticket, sequences=states, swapped=there)
    walk.on_event(walk.decode, Requeued("r1", 1, RequeueReason.PREEMPTED, given))
    assert walk.request.status is RequestStatus.QUEUED
    assert walk.request.num_uncomputed == 2
    issuer, walk.decode = walk.decode, ScriptedWorker("next")
    assert await walk.reserve()
    assert walk.decode.sent == [Reserve("r1", walk.request.attempt.number, 2)]
    again = walk.start()
    assert again.swapped == there
    assert again.sequences == (states[0], states[2])
    walk.request.close()
    assert issuer.sent[-1] == Abort("r1", 1)


async def test_a_search_comes_back_where_it_stood() -> None:
    """The client has nothing: the state of the search is that of the last ticket."""
    walk = searching()
    ticket = await until_searching(walk)
    there = Swapped("colder", "h", 2, tuple(SwappedTable(i, (1, 2 + i)) for i in range(3)))
    given = begun(ticket, num_tokens=4)
    bare = tuple(TicketSequence(state.index, state.token_ids) for state in given.sequences)
    given = replace(given, sequences=bare, swapped=there)
    walk.on_event(walk.decode, Requeued("r1", 1, RequeueReason.PREEMPTED, given))
    assert walk.request.status is RequestStatus.QUEUED
    again = await walk.until_prefilling()
    assert (again.swapped, again.sequences, again.beams) == (there, bare, given.beams)
    walk.request.close()
