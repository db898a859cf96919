"""Beam searches at the workers: their hypotheses, their moves, and that no block stays held."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from services.protocol.messages import Generated
from services.protocol.ticket import Hypothesis, Ticket
from services.runtime.errors import InvalidRequest

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT
from .runs import outputs, prefill, start
from .searches import MAX_TOKENS, asked, right


def hypotheses(drawn: Iterable[Any]) -> tuple[Hypothesis, ...]:
    found = [output for output in drawn if output.token_ids]
    assert [output.index for output in found] == list(range(len(found)))
    return tuple(Hypothesis(one.token_ids, one.score, one.finish_reason) for one in found)


async def result(pair: WorkerPair, request_id: str = "r1") -> tuple[Hypothesis, ...]:
    await pair.until(lambda: bool(hypotheses(outputs(pair.session, request_id))))
    return hypotheses(outputs(pair.session, request_id))


async def test_beams_share_their_common_blocks(make_pair: MakePair) -> None:
    """Each beam writes only its own tail: a step computes one token of each beam, and copies only
    the blocks of forks."""
    pair = await make_pair(num_blocks=160)
    wanted = asked(width=8)
    await start(pair, wanted)
    assert await result(pair) == right(wanted)
    assert pair.arena.num_computed == len(wanted.prompt_token_ids) + 8 * (MAX_TOKENS - 1)
    assert pair.arena.num_copied < 8 * MAX_TOKENS
    await pair.until_empty()


async def test_search_reports_its_progress(pair: WorkerPair) -> None:
    await start(pair, asked(max_tokens=500, width=2))
    await pair.until(lambda: len(outputs(pair.session, "r1")) > 3)
    assert set(outputs(pair.session, "r1")) == {Generated("r1", 1, 0, len(PROMPT) + 1)}
    pair.decode.role.abort(pair.session, "r1", 1)
    await pair.until_empty()


async def test_a_search_needs_a_slot_for_each_beam_that_it_may_have(pair: WorkerPair) -> None:
    issued: Ticket = await prefill(pair, asked())
    assert issued.beams is not None
    one = replace(
        issued,
        sequences=issued.sequences[:1],
        beams=replace(issued.beams, scores=issued.beams.scores[:1]),
    )
    pair.decode.role.reserve(pair.session, *issued.key, 3)
    with pytest.raises(InvalidRequest, match="4 sequences for 3 slots"):
        pair.decode.role.admit(pair.session, one)
    num_free = pair.decode.role.load().num_free_slots
    pair.decode.role.abort(pair.session, *issued.key)
    pair.decode.role.reserve(pair.session, *issued.key, 5)
    pair.decode.role.admit(pair.session, one)
    assert pair.decode.role.load().num_free_slots == num_free + 3 - 4
    pair.decode.role.abort(pair.session, *issued.key)
    await pair.until_empty()


async def test_stop_conditions_do_not_end_a_beam(pair: WorkerPair) -> None:
    """Not even with few tokens: the search could not continue with fewer beams."""
    wanted = asked()
    issued = await start(pair, wanted)
    for index in range(4):
        pair.decode.role.abort(pair.session, *issued.key, index)
    assert await result(pair) == right(wanted)
    await pair.until_empty()
