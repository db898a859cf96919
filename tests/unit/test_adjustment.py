"""The adjustment of logits by a sequence's tokens: each parameter by its definition, and the same
whether the tokens came one by one or all at once."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.sampling.adjustment import Adjustment
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams
from tests.examples import examples

no_deadline = settings(max_examples=examples(200))

VOCAB_SIZE = 8
NONE = -math.inf


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 99, **NEUTRAL} | changes))


NEUTRAL: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def adjusted(
    logits: Sequence[float],
    p: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> list[float]:
    adjustment = PenaltyState(p, [*prompt, *output], len(prompt), ends).adjustment()
    if adjustment is None:
        return list(logits)
    found: list[float] = adjustment.applied(torch.tensor(logits)).tolist()
    return found


def plain(
    logits: Sequence[float],
    p: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Sequence[int],
) -> list[float]:
    """Token by token, from vLLM's description of each parameter."""
    result = list(logits)
    for token in range(VOCAB_SIZE):
        result[token] += dict(p.logit_bias).get(token, 0.0)
        if token in [*prompt, *output]:
            factor = 1 / p.repetition_penalty if result[token] > 0 else p.repetition_penalty
            result[token] *= factor
        result[token] -= p.frequency_penalty * list(output).count(token)
        result[token] -= p.presence_penalty * (token in output)
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            result[token] = NONE
    unbanned = list(result)
    for word in p.bad_words:
        before, last = list(word[:-1]), word[-1]
        if list(output)[len(output) - len(before) :] == before and len(before) <= len(output):
            result[last] = NONE
    if len(output) < p.min_tokens:
        for token in ends:
            result[token] = NONE
    return result if max(result) > NONE else unbanned


tokens = st.integers(0, VOCAB_SIZE - 1)
some_tokens = st.lists(tokens, max_size=6)
small = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.5])
samplings = st.builds(
    params,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 3.0]),
    presence_penalty=small,
    frequency_penalty=small,
    logit_bias=st.dictionaries(tokens, st.floats(-9, 9, width=16)).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    allowed_token_ids=st.lists(tokens, max_size=4).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 4),
)


@no_deadline
@given(
    st.lists(st.floats(-30, 30, width=16), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    samplings,
    some_tokens,
    some_tokens,
    st.lists(tokens, max_size=3),
)
def test_adjustments_together_equal_a_plain_reference(
    logits: list[float], p: SamplingParams, prompt: list[int], output: list[int], ends: list[int]
) -> None:
    expected = plain(logits, p, prompt, output, ends)
    assert adjusted(logits, p, prompt, output, ends) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@no_deadline
@given(samplings, some_tokens, some_tokens, st.lists(tokens, max_size=3))
def test_adjustment_is_a_function_of_the_tokens_alone(
    p: SamplingParams, prompt: list[int], output: list[int], ends: list[int]
) -> None:
    """Law 7: at every length, a history that has received the tokens one by one, and a new one, as
    after a preemption, a move or a crash, adjust the logits equally to the last bit."""
    logits = torch.linspace(-3, 3, VOCAB_SIZE)

    def applied(adjustment: Adjustment | None) -> list[float]:
        found: list[float] = (adjustment.applied(logits) if adjustment else logits).tolist()
        return found

    growing = list(prompt)
    kept = PenaltyState(p, growing, len(prompt), ends)
    for length in range(len(output) + 1):
        new = PenaltyState(p, [*prompt, *output[:length]], len(prompt), ends)
        assert applied(kept.adjustment()) == applied(new.adjustment())
        growing.extend(output[length : length + 1])


def test_repetition_counts_prompt_and_output() -> None:
    p = params(repetition_penalty=2.0)
    found = adjusted([4.0, -4.0, 4.0, -4.0, 0.0], p, prompt=[0, 1, 1], output=[2, 2])
    assert found == [2.0, -8.0, 2.0, -4.0, 0.0]


def test_frequency_and_presence_count_the_output_alone() -> None:
    p = params(frequency_penalty=0.5, presence_penalty=0.25)
    assert adjusted([1.0] * 4, p, prompt=[0, 0, 1], output=[1, 2, 2]) == [1.0, 0.25, -0.25, 1.0]


def test_a_bias_goes_before_the_penalties() -> None:
    p = params(logit_bias=((0, -3.0), (1, 3.0)), repetition_penalty=2.0)
    assert adjusted([2.0, -2.0], p, prompt=[0, 1]) == [-2.0, 0.5]


def test_a_penalty_makes_nothing_infinite() -> None:
    """Neither an overflow nor a logit of -inf becomes a token that is drawn."""
    largest = torch.finfo(torch.float32).max
    p = params(repetition_penalty=1e-38)
    assert adjusted([20.0, -20.0, NONE], p, prompt=[0, 1, 2]) == pytest.approx(
        [largest, 0.0, NONE], abs=1e-30
    )


def test_a_bad_word_is_banned_where_it_would_be_complete() -> None:
    p = params(bad_words=((1, 2, 3), (4,), (3, 0)))
    assert adjusted([0.0] * 5, p, output=[0, 1, 2]) == [0.0, 0.0, 0.0, NONE, NONE]
    assert adjusted([0.0] * 5, p, output=[1, 2, 3]) == [NONE, 0.0, 0.0, 0.0, NONE]
    assert adjusted([0.0] * 5, p, prompt=[1, 2]) == [0.0, 0.0, 0.0, 0.0, NONE]  # not of the prompt


def test_no_end_comes_before_min_tokens() -> None:
    p = params(min_tokens=2, ignore_eos=True)
    for output, expected in ([], [0.0, NONE]), ([0], [0.0, NONE]), ([0, 0], [0.0, 0.0]):
        assert adjusted([0.0, 0.0], p, output=output, ends=[1]) == expected


def test_bans_that_leave_nothing_are_left_out() -> None:
    """Otherwise there would be no token to draw; tokens that are not allowed stay excluded."""
    p = params(allowed_token_ids=(1, 2), bad_words=((1,), (0, 2)), min_tokens=1)
    assert adjusted([0.0] * 3, p, output=[0]) == [NONE, 0.0, 0.0]
    assert adjusted([0.0] * 3, p, output=[1]) == [NONE, NONE, 0.0]


@pytest.mark.parametrize("p", [params(), params(temperature=0.7, top_k=5, stop_token_ids=(3,))])
def test_requests_without_penalties_keep_no_state(p: SamplingParams) -> None:
    assert not PenaltyState.is_needed(p)


def test_a_draw_that_nothing_changes_has_no_adjustment() -> None:
    """Its token is the model's likeliest, without logits in memory."""
    waiting = params(frequency_penalty=1.0, bad_words=((1, 2),), min_tokens=1)
    assert PenaltyState(waiting, [5, 6], 2, []).adjustment() is None
    assert PenaltyState(params(min_tokens=1), [5, 6], 1, [3]).adjustment() is None
