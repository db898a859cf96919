"""Translates rows into queries to the final states of a step, and the answers into row results.

row     |--- tokens scored ---|------|-end-|     states: one for each token that the row scores,
states   s s s s s s s s s s s         d         and the last one if the row has any draws; or the
                                                 last `num_states` ones

row     | token |------ drafts ------|           a row with drafts: a state for each of its draws
states      d     d   d   d   d   d
"""

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from services.engine.batch import Answer, Fault, Query, Row, RowOutput, RowResult
from services.protocol.logprobs import Logprobs


def wanted_states(rows: Sequence[Row]) -> list[int]:
    """The states that the rows need, as ascending indices into the tokens of the step."""
    wanted: list[int] = []
    begin = 0
    for row in rows:
        end = begin + len(row.token_ids)
        wanted += range(begin, begin + _num_scored(row))
        wanted += range(end - row.num_states, end)
        if row.draws:
            wanted += range(end - 1 - row.num_drafts, end)
        begin = end
    return wanted


def queries(rows: Sequence[Row]) -> list[Query]:
    """The queries of the rows, in order: for each row the tokens of its `scoring`, then its draws.
    A query's `state` is an index into `wanted_states`."""
    asked: list[Query] = []
    state = 0
    for row in rows:
        if row.scoring is not None:
            for position, token_id in enumerate(row.scoring.token_ids, row.start + 1):
                asked.append(Query(state, token_id, position, row.scoring.num_top))
                state += 1
        state += row.num_states
        first = row.start + len(row.token_ids) - row.num_drafts
        for number, draw in enumerate(row.draws):
            behind = number if row.num_drafts else 0  # without drafts, all draw after one token
            asked.append(Query(state + behind, draw, first + behind, draw.sampling.logprobs))
        state += (row.num_drafts + 1) * bool(row.draws)
    return asked


def row_results(rows: Sequence[Row], answers: Iterable[Answer | Fault]) -> list[RowResult]:
    """The results of the rows, from the answers to their `queries`, in the same order."""
    remaining = iter(answers)
    return [
        _row_result(
            list(islice(remaining, _num_scored(row))),
            _valid(row, list(islice(remaining, len(row.draws)))),
        )
        for row in rows
    ]


def with_states(
    rows: Sequence[Row], results: Sequence[RowResult], states: NDArray[np.float32]
) -> list[RowResult]:
    """The results, with the states that rows ask for; `states`: all that `wanted_states` names."""
    found, begin = list(results), 0
    for i, row in enumerate(rows):
        if row.num_states:
            part = states[begin : begin + row.num_states]
            is_finite = bool(np.isfinite(part).all())
            found[i] = RowOutput((), states=part) if is_finite else Fault.NOT_FINITE
        begin += _num_scored(row) + row.num_states + (row.num_drafts + 1) * bool(row.draws)
    return found


def _valid(row: Row, drawn: Sequence[Answer | Fault]) -> Sequence[Answer | Fault]:
    """The draws of a row with drafts before its first fault, which may follow from a wrong draft.
    If it does not, the next step finds it again."""
    if not row.num_drafts or isinstance(drawn[0], Fault):
        return drawn
    return list(takewhile(lambda answer: not isinstance(answer, Fault), drawn))


def _row_result(scored: Sequence[Answer | Fault], drawn: Sequence[Answer | Fault]) -> RowResult:
    for answer in (*scored, *drawn):
        if isinstance(answer, Fault):
            return answer
    tokens = tuple(answer.token_id for answer in drawn if isinstance(answer, Answer))
    prompt, logprobs = _logprobs(scored), _logprobs(drawn)
    return RowOutput(tokens, logprobs, prompt) if prompt or logprobs else tokens


def _logprobs(answers: Sequence[Answer | Fault]) -> tuple[Logprobs, ...]:
    return tuple(
        answer.logprobs
        for answer in answers
        if isinstance(answer, Answer) and answer.logprobs is not None
    )


def _num_scored(row: Row) -> int:
    return 0 if row.scoring is None else len(row.scoring.token_ids)
