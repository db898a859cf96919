"""The states that a step queries, and the distribution of the answers."""

from collections.abc import Sequence
from dataclasses import replace

from services.engine.batch import Answer, Draw, Fault, Query, Row, RowOutput, Scoring
from services.engine.sampling.logit_queries import queries, row_results, wanted_states
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import SamplingParams


def draw(logprobs: int | None = None) -> Draw:
    return Draw(SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=8, logprobs=logprobs), 0)


def row(num_tokens: int, draw: Draw | None = None, scoring: Scoring | None = None) -> Row:
    return Row([1] * num_tokens, 0, [0], 0, () if draw is None else (draw,), scoring)


def answers(queries: Sequence[Query], broken: Sequence[int] = ()) -> list[Answer | Fault]:
    """Each draw gives 10 + the sequence's index; the logprob of a token is minus its id, its rank
    is the state. The states `broken` give nothing."""
    return [Fault.NOT_FINITE if q.state in broken else answer(q) for q in queries]


def answer(query: Query) -> Answer:
    token = query.token if isinstance(query.token, int) else 10 + query.token.sequence_index
    return Answer(token, None if query.num_top is None else scores(token, query.state))


def scores(token: int, state: int) -> Logprobs:
    return Logprobs(-float(token), state)


def test_rows_that_ask_nothing_are_told_tokens() -> None:
    rows = [row(3), row(1, draw()), row(2, draw())]
    asked = queries(rows)
    assert wanted_states(rows) == [3, 5]
    assert asked == [Query(0, draw(), 1), Query(1, draw(), 2)]
    assert row_results(rows, answers(asked, broken=[1])) == [(), (10,), Fault.NOT_FINITE]


def test_logit_queries_are_answered() -> None:
    """Each query gets as many of the likeliest tokens as it asks for."""
    rows = [row(1, draw(0)), row(1, draw()), row(1, draw(2))]
    asked = queries(rows)
    assert [query.num_top for query in asked] == [0, None, 2]
    assert row_results(rows, answers(asked)) == [
        RowOutput((10,), (scores(10, 0),)),
        (10,),
        RowOutput((10,), (scores(10, 2),)),
    ]


def test_a_prompt_is_told_chunk_by_chunk() -> None:
    """A chunk in the middle queries each of its states, the last one all but its end, which
    draws."""
    rows = [row(2, None, Scoring([8, 9], 1)), row(3, draw(0), Scoring([5, 6], 0)), row(1, draw())]
    asked = queries(rows)
    assert wanted_states(rows) == [0, 1, 2, 3, 4, 5]
    assert asked == [
        *(Query(0, 8, 1, 1), Query(1, 9, 2, 1)),
        *(Query(2, 5, 1, 0), Query(3, 6, 2, 0), Query(4, draw(0), 3, 0)),
        Query(5, draw(), 1),
    ]
    assert row_results(rows, answers(asked)) == [
        RowOutput((), (), (scores(8, 0), scores(9, 1))),
        RowOutput((10,), (scores(10, 4),), (scores(5, 2), scores(6, 3))),
        (10,),
    ]


def test_states_behind_the_prompt_are_not_asked_about() -> None:
    """As when generated tokens are computed again with it."""
    rows = [row(5, draw(), Scoring([8], 0)), row(1, draw())]
    assert wanted_states(rows) == [0, 4, 5]
    assert queries(rows) == [Query(0, 8, 1, 0), Query(1, draw(), 5), Query(2, draw(), 1)]


def test_a_prompt_that_cannot_be_scored_breaks_its_row_alone() -> None:
    rows = [row(2, None, Scoring([8, 9], 0)), row(1, draw(0))]
    found = answers(queries(rows), broken=[1])
    assert row_results(rows, found) == [Fault.NOT_FINITE, RowOutput((10,), (scores(10, 2),))]


def test_a_fault_of_the_draw_stays_one() -> None:
    rows = [row(2, draw(3), Scoring([8], 0)), row(1, draw())]
    assert row_results(rows, answers(queries(rows), broken=[1])) == [Fault.NOT_FINITE, (10,)]


def test_tokens_of_one_state_are_each_told() -> None:
    """The tokens of a group's sequences, the last two of which have drawn the same."""
    of_group = tuple(replace(draw(0), sequence_index=index) for index in (3, 1, 1))
    rows = [replace(row(2), draws=of_group), row(1, draw(0))]
    asked = queries(rows)
    assert wanted_states(rows) == [1, 2]
    assert asked == [*(Query(0, one, 2, 0) for one in of_group), Query(1, draw(0), 1, 0)]
    several, one = row_results(rows, answers(asked))
    assert several == RowOutput((13, 11, 11), tuple(scores(token, 0) for token in (13, 11, 11)))
    assert one == RowOutput((10,), (scores(10, 1),))
