"""The sampling head: answers all queries to the final states of a step, from one computation of
their logits. This module is the definition, and has what all models share.

`services.engine.sampling.sampler` draws tokens, `services.engine.sampling.logprobs` scores them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from services.engine.batch import Answer, Draw, Fault, Query
from services.engine.sampling.logprobs import score
from services.engine.sampling.sampler import greedy_tokens, sample
from services.protocol.logprobs import Logprobs

LOGITS_AT_ONCE = 64
"""How many rows of a prompt's logits are in memory at once: 64 rows of 150,000 tokens are 39 MB."""


def split_states(queries: Sequence[Query]) -> Iterator[tuple[list[int], list[int]]]:
    """Divides the states into parts whose logits are computed together. Yields the states of a part
    and the indices of the queries to them. The first part has all states with draws; states that
    only score a prompt fill it up to `LOGITS_AT_ONCE`, and form the parts after it."""
    drawing = {query.state for query in queries if isinstance(query.token, Draw)}
    states = sorted({query.state for query in queries}, key=lambda s: (s not in drawing, s))
    end = max(len(drawing), LOGITS_AT_ONCE)
    for begin in (0, *range(end, len(states), LOGITS_AT_ONCE)):
        part = states[begin : end if begin == 0 else begin + LOGITS_AT_ONCE]
        in_part = set(part)
        yield part, [i for i, query in enumerate(queries) if query.state in in_part]


def answer_in_parts(
    logits: Callable[[list[int]], Tensor], queries: Sequence[Query]
) -> list[Answer | Fault]:
    """Answers the queries, part by part. `logits`: computes those of some states, fp32 [states,
    vocab_size]."""
    found: dict[int, Answer | Fault] = {}
    for states, asking in split_states(queries):
        places = {state: place for place, state in enumerate(states)}
        placed = [replace(queries[i], state=places[queries[i].state]) for i in asking]
        found |= zip(asking, answer(logits(states), placed), strict=True)
    return [found[i] for i in range(len(queries))]


def answer(logits: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
    """Answers the queries. Their `state` is a row of `logits`, fp32 [states, vocab_size]."""
    tokens = _tokens(logits, queries)
    asked = [
        (query.state, 0 if isinstance(token, Fault) else token, query.num_top)
        for query, token in zip(queries, tokens, strict=True)
        if query.num_top is not None
    ]
    scores: Sequence[Logprobs | Fault] = ()
    if asked:
        states, token_ids, num_tops = zip(*asked, strict=True)
        scores = score(logits[list(states)], token_ids, max(num_tops))
    return join_answers(queries, tokens, scores)


def _tokens(logits: Tensor, queries: Sequence[Query]) -> list[int | Fault]:
    """The token of each query. Only draws that are not plain copy logits to the host."""
    given = {i: query.token for i, query in enumerate(queries) if isinstance(query.token, int)}
    draws = {i: query.token for i, query in enumerate(queries) if isinstance(query.token, Draw)}
    plain = [i for i, draw in draws.items() if draw.is_plain]
    others = [i for i, draw in draws.items() if not draw.is_plain]
    found: dict[int, int | Fault] = {**given}
    if plain:
        largest = logits[[queries[i].state for i in plain]].max(dim=-1)
        found |= zip(plain, greedy_tokens(*largest), strict=True)
    if others:
        rows = logits[[queries[i].state for i in others]].cpu()
        positions = [queries[i].position for i in others]
        found |= zip(others, sample(rows, [draws[i] for i in others], positions), strict=True)
    return [found[i] for i in range(len(queries))]


def join_answers(
    queries: Sequence[Query], tokens: Sequence[int | Fault], scores: Sequence[Logprobs | Fault]
) -> list[Answer | Fault]:
    """Joins the tokens of all queries with the `scores` of those that ask for logprobs, in order.
    Each score may have more of the likeliest tokens than its query asks for; the rest is cut."""
    remaining = iter(scores)
    return [_answer(query, token, remaining) for query, token in zip(queries, tokens, strict=True)]


def _answer(query: Query, token: int | Fault, scores: Iterator[Logprobs | Fault]) -> Answer | Fault:
    if query.num_top is None:
        return token if isinstance(token, Fault) else Answer(token)
    found = next(scores)
    if isinstance(token, Fault):
        return token
    return found if isinstance(found, Fault) else Answer(token, _cut(found, query.num_top))


def _cut(found: Logprobs, num_top: int) -> Logprobs:
    if len(found.top_token_ids) <= num_top:
        return found
    return replace(
        found,
        top_token_ids=found.top_token_ids[:num_top],
        top_logprobs=found.top_logprobs[:num_top],
    )
