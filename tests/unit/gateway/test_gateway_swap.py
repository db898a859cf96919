"""A request that gave way and was swapped out: it waits in line, and goes through prefill with its
KV in the colder pool."""

from dataclasses import replace

import pytest

from services.common.ticket import FinishReason, Swapped, Ticket, TicketSequence
from services.gateway.messages import Abort, Generated, Requeued, RequeueReason, Submit
from services.gateway.stage import Stage

from .walk import MAX_TOKENS, PROMPT, ScriptedWorker, Walk, expected

SWAPPED = Swapped("colder", "h", 2, (4, 5), num_computed_tokens=len(PROMPT) + 1)


def swapped_out(walk: Walk, ticket: Ticket, num_tokens: int = 2) -> Requeued:
    sequence = TicketSequence(0, tuple(expected(num_tokens)))
    attempt = walk.journey.attempt
    given = replace(ticket, attempt=attempt, sequences=(sequence,), swapped=SWAPPED)
    return Requeued("r1", attempt, RequeueReason.PREEMPTED, given)


async def waiting(walk: Walk) -> ScriptedWorker:
    """Two tokens came, then it was swapped out; the decode worker that keeps it."""
    ticket = await walk.until_decoding()
    second = (expected(2)[1],)
    step = Generated("r1", walk.journey.attempt, 0, walk.journey.client.num_tokens, second, None)
    walk.journey.on_event(walk.decode, step)
    walk.journey.on_event(walk.decode, swapped_out(walk, ticket))
    assert walk.journey.stage is Stage.QUEUED
    assert not walk.decode.guests
    issuer, walk.decode = walk.decode, ScriptedWorker("next")
    return issuer


async def test_it_goes_on_through_prefill_which_is_told_where_its_blocks_are() -> None:
    walk = Walk()
    issuer = await waiting(walk)
    assert not walk.journey.can_go_on
    assert walk.journey.num_uncomputed == 1
    assert walk.output.tally.num_preemptions == 1
    assert await walk.reserve()
    ticket = walk.start()
    assert (ticket.swapped, ticket.sequences[0].token_ids) == (SWAPPED, tuple(expected(2)))
    assert not [command for command in issuer.sent if isinstance(command, Abort)]
    walk.journey.on_event(walk.prefill, walk.prefilled(ticket))
    assert issuer.sent[-1] == Abort("r1", 1)  # it need not keep anything any more
    rest = expected(MAX_TOKENS)[3:]
    position = walk.journey.client.num_tokens
    last = Generated("r1", walk.journey.attempt, 0, position, tuple(rest), FinishReason.LENGTH)
    walk.journey.on_event(walk.decode, last)
    assert await walk.tokens() == expected(MAX_TOKENS)


async def test_a_prefill_worker_that_gives_it_back_leaves_it_where_it_was() -> None:
    """Only who claims it there knows whether it is there."""
    walk = Walk()
    issuer = await waiting(walk)
    assert await walk.reserve()
    walk.start()
    walk.journey.on_event(
        walk.prefill, Requeued("r1", walk.journey.attempt, RequeueReason.DRAINING)
    )
    assert await walk.reserve()
    walk.prefill.draining = False
    assert walk.start().swapped == SWAPPED
    assert not [command for command in issuer.sent if isinstance(command, Abort)]
    walk.journey.end()
    assert issuer.sent[-1] == Abort("r1", 1)


@pytest.mark.parametrize("how", ["taken back", "issuer lost", "given up"])
async def test_one_that_is_gone_is_computed_again(how: str) -> None:
    walk = Walk()
    issuer = await waiting(walk)
    match how:
        case "taken back":
            walk.journey.on_event(issuer, Requeued("r1", 1, RequeueReason.STALE_TICKET))
        case "issuer lost":
            walk.journey.on_lost(issuer, died=True)
        case "given up":  # there is no slot on its pool
            walk.journey.give_up_ticket()
    assert await walk.reserve()
    assert walk.start().swapped is None
    assert (Abort("r1", 1) in issuer.sent) == (how == "given up")
    walk.journey.end()


async def test_one_that_does_not_go_on_where_we_are_is_refused() -> None:
    walk = Walk()
    ticket = await walk.until_decoding()
    walk.journey.on_event(walk.decode, swapped_out(walk, ticket, num_tokens=3))
    assert walk.journey.at_rest is None
    assert Abort("r1", 1) in walk.decode.sent
    assert [c for c in walk.prefill.sent if isinstance(c, Submit)] != []
    walk.journey.end()
