"""The queries of a step's states, and the number of passes over the head's weights."""

from dataclasses import replace

import torch

from services.engine.batch import Answer, Draw, Fault, Query
from services.engine.sampling.logprobs import score
from services.engine.sampling.sampler import sample
from services.engine.sampling.sampling_head import LOGITS_AT_ONCE, answer, split_states
from services.protocol.ticket import SamplingParams

GREEDY = Draw(SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=8), 0)
DRAWN = replace(GREEDY, sampling=replace(GREEDY.sampling, temperature=1.0))


def test_a_decode_step_is_one_part_whatever_its_rows_ask() -> None:
    queries = [
        Query(state, (GREEDY, DRAWN)[state % 2], 9, (None, 3)[state % 2]) for state in range(9)
    ]
    assert list(split_states(queries)) == [(list(range(9)), list(range(9)))]


def test_states_that_draw_come_first_and_a_prompts_some_at_a_time() -> None:
    """States 0 to 99 belong to a prompt, 100 draws twice, 101 to 139 belong to another prompt."""
    queries = [Query(state, 7, state, 0) for state in range(140) if state != 100]
    queries[100:100] = [Query(100, DRAWN, 50), Query(100, GREEDY, 50)]
    found = list(split_states(queries))
    assert [states for states, _ in found] == [
        [100, *range(63)],
        [*range(63, 100), *range(101, 128)],
        list(range(128, 140)),
    ]
    assert found[0][1] == [*range(63), 100, 101]
    assert sorted(i for _, asking in found for i in asking) == list(range(141))


def test_more_draws_than_that_are_still_one_part() -> None:
    draws = [Query(state, DRAWN, 3) for state in range(LOGITS_AT_ONCE + 9)]
    assert [len(states) for states, _ in split_states([*draws, Query(500, 7, 3, 0)])] == [73, 1]


def test_rows_are_sampled_with_their_own_state() -> None:
    """Draws and given tokens, several to a state, with as many likeliest tokens as each asks
    for."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    queries = [
        *(Query(2, GREEDY, 5, 1), Query(0, 17, 5, 0), Query(2, DRAWN, 5)),
        *(Query(1, DRAWN, 6, 4), Query(1, GREEDY, 6)),
    ]
    drawn = sample(logits[[2, 1]], [DRAWN, DRAWN], [5, 6])
    tokens = [int(logits[2].argmax()), 17, *drawn, int(logits[1].argmax())]
    found = answer(logits, queries)
    assert [one.token_id for one in found if isinstance(one, Answer)] == tokens
    for query, token, one in zip(queries, tokens, found, strict=True):
        assert isinstance(one, Answer)
        assert isinstance(token, int)
        if query.num_top is None:
            assert one.logprobs is None
        else:
            assert [one.logprobs] == score(logits[[query.state]], [token], query.num_top)


def test_a_state_that_is_not_finite_is_a_fault_of_its_own_queries() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = float("nan")
    asked = [Query(1, GREEDY, 0, 2), Query(0, 5, 0, 0), Query(1, DRAWN, 0), Query(1, 3, 0, 1)]
    found = answer(logits, asked)
    assert [isinstance(one, Answer) for one in found] == [False, True, False, False]
    assert found[0] is found[2] is found[3] is Fault.NOT_FINITE
