"""Tickets that a decode worker refuses."""

from dataclasses import replace
from typing import Any

import pytest

from services.protocol.messages import Failed, Requeued, RequeueReason
from services.protocol.ticket import TicketSequence
from services.runtime.errors import InvalidRequest

from .conftest import WorkerPair
from .fakes import PROMPT, expected, ticket
from .runs import finished, outputs, prefill, tokens

BEYOND = 1 << 31


@pytest.mark.parametrize(
    "sequence",
    [
        TicketSequence(0, token_ids=(1,), block_ids=(0, 1), num_computed_tokens=10),
        TicketSequence(0, token_ids=(1,), block_ids=(0, 1, 99), num_computed_tokens=10),
        TicketSequence(0, token_ids=(1,), block_ids=(0, 1, 2), num_computed_tokens=11),
    ],
    ids=["too few blocks", "no such block", "nothing to compute"],
)
async def test_a_ticket_that_makes_no_sense_is_refused(
    pair: WorkerPair, sequence: TicketSequence
) -> None:
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    with pytest.raises(InvalidRequest):
        pair.decode.role.admit(pair.session, ticket("r1", PROMPT, sequences=(sequence,)))


@pytest.mark.parametrize(
    "named",
    [
        {"stop_token_ids": (BEYOND,)},
        {"logit_bias": ((BEYOND, 1.0),)},
        {"allowed_token_ids": (1, BEYOND)},
        {"bad_words": ((1,), (2, BEYOND))},
    ],
    ids=lambda named: next(iter(named)),
)
async def test_sampling_names_tokens_of_the_vocabulary(
    pair: WorkerPair, named: dict[str, Any]
) -> None:
    """The token ids of a ticket are indices into the logits."""
    asked = ticket("r1", PROMPT)
    asked = replace(asked, sampling=replace(asked.sampling, **named))
    with pytest.raises(InvalidRequest, match="beyond the vocabulary of 2147483648"):
        pair.prefill.role.submit(pair.session, asked)


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


@pytest.mark.parametrize("token", [50_000, 2**32 - 1])
async def test_tokens_beyond_the_vocabulary_are_refused(pair: WorkerPair, token: int) -> None:
    """They would end the worker, with all its requests."""
    issued = await prefill(pair, ticket("r1", PROMPT))
    pair.decode.limits = replace(pair.decode.limits, vocab_size=50_000)
    (state,) = issued.sequences
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        pair.decode.role.admit(
            pair.session, replace(issued, sequences=(replace(state, token_ids=(token,)),))
        )
