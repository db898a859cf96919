"""Tickets that a decode worker refuses."""

from dataclasses import replace

import pytest

from services.protocol.messages import Failed, Requeued, RequeueReason
from services.runtime.errors import InvalidRequest

from .conftest import WorkerPair
from .fakes import PROMPT, expected, ticket
from .runs import finished, outputs, prefill, tokens


async def test_a_ticket_with_blocks_that_its_holder_does_not_have_is_refused(
    pair: WorkerPair,
) -> None:
    """No worker reads another holder's blocks by naming them, and the right ticket can still be
    claimed."""
    other = await prefill(pair, ticket("r2", range(50, 60)))
    issued = await prefill(pair, ticket("r1", PROMPT))
    (state,) = issued.sequences
    forged = replace(state, block_ids=other.sequences[0].block_ids)
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, replace(issued, sequences=(forged,)))
    await pair.until(lambda: bool(pair.session.of(Failed)))
    assert pair.session.of(Failed)[0].code == "invalid_request"
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, issued)
    await pair.until(lambda: finished(pair.session, "r1"))
    assert tokens(pair.session, issued) == expected(PROMPT, 8)


async def test_a_ticket_whose_blocks_hold_other_tokens_is_computed_again(pair: WorkerPair) -> None:
    """The worker would otherwise write on, and publish, wrong blocks."""
    issued = await prefill(pair, ticket("r1", PROMPT))
    forged = replace(issued, prompt_token_ids=(99, *PROMPT[1:]))
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, forged)
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    assert pair.session.of(Requeued)[0].reason is RequeueReason.STALE_TICKET
    await pair.until_empty()


async def test_a_shortened_ticket_does_not_write_into_finished_blocks(pair: WorkerPair) -> None:
    issued = await prefill(pair, ticket("r1", PROMPT))
    (state,) = issued.sequences
    short = replace(
        issued, prompt_token_ids=PROMPT[:4], sequences=(replace(state, num_computed_tokens=4),)
    )
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, short)
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    assert not outputs(pair.session, "r1")


async def test_a_holder_has_one_sequence(pair: WorkerPair) -> None:
    """The same ticket again, as another attempt or from another gateway: only one of them runs."""
    issued = await prefill(pair, ticket("r1", PROMPT, max_tokens=30))
    pair.decode_model.gate.clear()
    for attempt in (1, 2):
        pair.decode.role.reserve(pair.session, "r1", attempt, 1)
    pair.decode.role.admit(pair.session, issued)
    with pytest.raises(InvalidRequest, match="already claimed"):
        pair.decode.role.admit(pair.session, replace(issued, attempt=2))
    pair.decode_model.gate.set()
    await pair.until(lambda: finished(pair.session, "r1"))
    assert tokens(pair.session, issued) == expected(PROMPT, 30)
