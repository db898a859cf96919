"""What rows have to tell beside their tokens: which states of a step are asked about, and who gets
what they say.

    row     |--- tokens scored ---|------|-end-|     states wanted: one for each token scored, and
    states   s s s s s s s s s s s         d         the last one if the row draws, however often
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from services.engine.batch import Answer, Drawn, Fault, Query, Row, Told
from services.protocol.logprobs import Logprobs


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


def queries(rows: Sequence[Row]) -> list[Query]:
    """Row after row: the tokens of its `scoring`, then its draws."""
    asked: list[Query] = []
    state = 0
    for row in rows:
        if row.scoring is not None:
            for position, token_id in enumerate(row.scoring.token_ids, row.start + 1):
                asked.append(Query(state, token_id, position, row.scoring.num_top))
                state += 1
        if row.draws:
            end = row.start + len(row.token_ids)
            asked += (Query(state, draw, end, draw.sampling.logprobs) for draw in row.draws)
            state += 1
    return asked


def told(rows: Sequence[Row], answers: Iterable[Answer | Fault]) -> list[Drawn]:
    """From the answers to their queries."""
    found = iter(answers)
    return [
        _told(list(islice(found, _num_scored(row))), list(islice(found, len(row.draws))))
        for row in rows
    ]


def _told(scored: Sequence[Answer | Fault], drawn: Sequence[Answer | Fault]) -> Drawn:
    for answer in (*scored, *drawn):
        if isinstance(answer, Fault):
            return answer
    tokens = tuple(answer.token_id for answer in drawn if isinstance(answer, Answer))
    prompt, logprobs = _logprobs(scored), _logprobs(drawn)
    return Told(tokens, logprobs, prompt) if prompt or logprobs else tokens


def _logprobs(answers: Sequence[Answer | Fault]) -> tuple[Logprobs, ...]:
    return tuple(
        answer.logprobs
        for answer in answers
        if isinstance(answer, Answer) and answer.logprobs is not None
    )


def _num_scored(row: Row) -> int:
    return 0 if row.scoring is None else len(row.scoring.token_ids)
