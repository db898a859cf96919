"""What rows have to tell beside their tokens: which states of a step are asked about, and who gets
what they say.

    row     |--- tokens scored ---|------|-end-|     states wanted: one for each token scored, and
    states   s s s s s s s s s s s         d         the last one if the row draws, however often
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.logprobs import Logprobs
from services.engine.batch import Drawn, Fault, Row, Told

Score = Callable[[Sequence[int], Sequence[int], int], Sequence[Logprobs | Fault]]
"""(states, a token for each, how many of the likeliest beside it)."""

_Tokens = tuple[int, ...] | Fault
"""What a row drew."""

_Query = tuple[int, int, int]
"""(state, token, how many of the likeliest)."""


def wanted_states(rows: Sequence[Row]) -> list[int]:
    """Their indices among the tokens of the step, rising."""
    wanted: list[int] = []
    begin = 0
    for row in rows:
        end = begin + len(row.token_ids)
        wanted += range(begin, begin + _num_scored(row))
        if row.draws:
            wanted.append(end - 1)
        begin = end
    return wanted


def states_that_draw(rows: Sequence[Row]) -> list[int]:
    """Their indices among the states wanted."""
    places, state = [], 0
    for row in rows:
        state += _num_scored(row)
        if row.draws:
            places.append(state)
            state += 1
    return places


def told(rows: Sequence[Row], drawn: Sequence[_Tokens], score: Score) -> list[Drawn]:
    """With what was asked to be told. Rows that ask for nothing cost nothing."""
    queries = _queries(rows, drawn)
    asked = [query for of_row in queries for query in of_row]
    if not asked:
        return list(drawn)
    states, token_ids, num_tops = zip(*asked, strict=True)
    found = iter(score(states, token_ids, max(num_tops)))
    return [
        _told(row, tokens, [_cut(next(found), num_top) for _, _, num_top in of_row])
        for row, tokens, of_row in zip(rows, drawn, queries, strict=True)
    ]


def _queries(rows: Sequence[Row], drawn: Sequence[_Tokens]) -> list[list[_Query]]:
    """Of each row: the tokens of its `scoring`, then those that it drew."""
    queries, state = [], 0
    for row, tokens in zip(rows, drawn, strict=True):
        of_row: list[_Query] = []
        if row.scoring is not None:
            for token_id in row.scoring.token_ids:
                of_row.append((state, token_id, row.scoring.num_top))
                state += 1
        if row.draws:
            num_top = row.draws[0].sampling.logprobs
            if num_top is not None and not isinstance(tokens, Fault):
                of_row += ((state, token, num_top) for token in tokens)
            state += 1
        queries.append(of_row)
    return queries


def _told(row: Row, tokens: _Tokens, found: list[Logprobs | Fault]) -> Drawn:
    if not found or isinstance(tokens, Fault):
        return tokens
    for logprobs in found:
        if isinstance(logprobs, Fault):
            return logprobs
    of_tokens = tuple(logprobs for logprobs in found if isinstance(logprobs, Logprobs))
    num_scored = _num_scored(row)
    return Told(tokens, of_tokens[num_scored:], of_tokens[:num_scored])


def _cut(found: Logprobs | Fault, num_top: int) -> Logprobs | Fault:
    """Others in the step may have asked for more."""
    if isinstance(found, Fault) or len(found.top_token_ids) <= num_top:
        return found
    return replace(
        found,
        top_token_ids=found.top_token_ids[:num_top],
        top_logprobs=found.top_logprobs[:num_top],
    )


def _num_scored(row: Row) -> int:
    return 0 if row.scoring is None else len(row.scoring.token_ids)
