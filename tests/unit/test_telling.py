"""Which states a step is asked about, and who gets what they say."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.common.logprobs import Logprobs
from services.common.ticket import SamplingParams
from services.engine.batch import Draw, Fault, Row, Scoring, Told
from services.engine.telling import states_that_draw, told, wanted_states


def draw(logprobs: int | None = None) -> Draw:
    return Draw(SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=8, logprobs=logprobs), 0)


def row(num_tokens: int, draw: Draw | None = None, scoring: Scoring | None = None) -> Row:
    return Row([1] * num_tokens, 0, [0], 0, () if draw is None else (draw,), scoring)


class Scores:
    """Says of a token that its logprob is minus its id, its rank the state."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], int]] = []
        self.broken: int | None = None

    def __call__(
        self, states: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> list[Logprobs | Fault]:
        self.calls.append((list(states), list(token_ids), num_top))
        top = tuple(range(num_top))
        return [
            Fault.NOT_FINITE
            if state == self.broken
            else Logprobs(-float(token), state, top, tuple(-float(i) for i in top))
            for state, token in zip(states, token_ids, strict=True)
        ]


@pytest.fixture
def scores() -> Scores:
    return Scores()


def test_rows_that_ask_nothing_cost_nothing(scores: Scores) -> None:
    rows = [row(3), row(1, draw()), row(2, draw())]
    assert told(rows, [(), (7,), Fault.NOT_FINITE], scores) == [(), (7,), Fault.NOT_FINITE]
    assert scores.calls == []
    assert wanted_states(rows) == [3, 5]
    assert states_that_draw(rows) == [0, 1]


def test_who_asks_is_told(scores: Scores) -> None:
    """Each as many of the likeliest as it asks for, all in one call."""
    rows = [row(1, draw(0)), row(1, draw()), row(1, draw(2))]
    assert told(rows, [(4,), (5,), (6,)], scores) == [
        Told((4,), (Logprobs(-4.0, 0),)),
        (5,),
        Told((6,), (Logprobs(-6.0, 2, (0, 1), (0.0, -1.0)),)),
    ]
    assert scores.calls == [([0, 2], [4, 6], 2)]


def test_a_prompt_is_told_chunk_by_chunk(scores: Scores) -> None:
    """A chunk in the middle asks about each of its states, the last one about all but the end,
    which draws."""
    rows = [row(2, None, Scoring([8, 9], 1)), row(3, draw(0), Scoring([5, 6], 0)), row(1, draw())]
    assert wanted_states(rows) == [0, 1, 2, 3, 4, 5]
    assert states_that_draw(rows) == [4, 5]
    assert told(rows, [(), (7,), (3,)], scores) == [
        Told((), (), (Logprobs(-8.0, 0, (0,), (0.0,)), Logprobs(-9.0, 1, (0,), (0.0,)))),
        Told((7,), (Logprobs(-7.0, 4),), (Logprobs(-5.0, 2), Logprobs(-6.0, 3))),
        (3,),
    ]


def test_states_behind_the_prompt_are_not_asked_about(scores: Scores) -> None:
    """As when generated tokens are computed again with it."""
    rows = [row(5, draw(), Scoring([8], 0)), row(1, draw())]
    assert wanted_states(rows) == [0, 4, 5]
    assert states_that_draw(rows) == [1, 2]


def test_a_prompt_that_cannot_be_scored_breaks_its_row_alone(scores: Scores) -> None:
    scores.broken = 1
    rows = [row(2, None, Scoring([8, 9], 0)), row(1, draw(0))]
    assert told(rows, [(), (7,)], scores) == [Fault.NOT_FINITE, Told((7,), (Logprobs(-7.0, 2),))]


def test_a_fault_of_the_draw_stays_one(scores: Scores) -> None:
    rows = [row(2, draw(3), Scoring([8], 0))]
    assert told(rows, [Fault.NOT_FINITE], scores) == [Fault.NOT_FINITE]


def test_tokens_of_one_state_are_each_told(scores: Scores) -> None:
    """Those of a group's sequences, of which two have drawn the same."""
    rows = [replace(row(2), draws=(draw(0), draw(0), draw(0))), row(1, draw(0))]
    assert (wanted_states(rows), states_that_draw(rows)) == ([1, 2], [0, 1])
    several, one = told(rows, [(4, 9, 4), (5,)], scores)
    assert several == Told((4, 9, 4), tuple(Logprobs(-float(token), 0) for token in (4, 9, 4)))
    assert one == Told((5,), (Logprobs(-5.0, 1),))
