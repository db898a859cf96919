"""The comparison of a stream with the expected output accepts it whole, and finds each
difference."""

from dataclasses import replace

import pytest

from quire.types import Beam, Candidate, Delta, Sampling, TokenLogprobs
from tests.chaos.cases import Case, Output, cases_of
from tests.chaos.received import ReceivedStream, Violation


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(Candidate(token_id, -0.5, 1, b"x"), ())


CASE = Case(
    "samples",
    "prompt",
    Sampling(n=2),
    (
        Output(
            (1, 2, 3), "abc", "stop", "c", (logprobs_of(1), logprobs_of(2), logprobs_of(3)), -1.5
        ),
        Output((4,), "d", "length", None, (logprobs_of(4),), None),
    ),
    prompt_logprobs=(logprobs_of(9),),
)
FIRST = Delta(
    "r1",
    0,
    (1, 2),
    "ab",
    logprobs=(logprobs_of(1), logprobs_of(2)),
    prompt_logprobs=(logprobs_of(9),),
)
OTHER = Delta("r1", 1, (4,), "d", "length", logprobs=(logprobs_of(4),))
LAST = Delta("r1", 0, (3,), "c", "stop", "c", logprobs=(logprobs_of(3),), score=-1.5)


def test_tokens_of_an_undisturbed_run_are_accepted() -> None:
    received = ReceivedStream(CASE)
    for delta in (FIRST, OTHER, LAST):
        received.add(delta)
    received.check_end()
    assert received.num_tokens == 4
    assert received.num_messages == 3


@pytest.mark.parametrize(
    "wrong",
    [
        replace(LAST, token_ids=(4,)),
        replace(LAST, token_ids=(3, 5)),
        replace(LAST, token_ids=()),
        replace(LAST, text="d"),
        replace(LAST, text=""),
        replace(LAST, logprobs=(logprobs_of(4),)),
        replace(LAST, logprobs=()),
        replace(LAST, finish_reason="length"),
        replace(LAST, stopped_by=None),
        replace(LAST, score=-1.4),
        replace(LAST, index=1),
        replace(LAST, index=2),
        replace(LAST, prompt_logprobs=(logprobs_of(9),)),
        OTHER,
    ],
)
def test_anything_else_is_a_violation(wrong: Delta) -> None:
    received = ReceivedStream(CASE)
    received.add(FIRST)
    received.add(OTHER)
    with pytest.raises(Violation):
        received.add(wrong)


def test_an_early_end_is_a_violation() -> None:
    received = ReceivedStream(CASE)
    received.add(FIRST)
    received.add(OTHER)
    with pytest.raises(Violation, match="2 of 3 and 1 of 1 tokens, and then the end"):
        received.check_end()


def test_a_seed_gives_requests_of_every_kind() -> None:
    """A seed always gives the same requests, with groups and beam searches, and long ones for slow
    users."""
    first, again, other = (cases_of(seed) for seed in (1, 1, 2))
    assert first == again != other
    assert any(case.sampling.n > 1 and case.sampling.beam is None for case in first)
    assert {case.sampling.beam for case in first} > {None, Beam(4), Beam(1)}
    assert sum(case.is_long for case in first) == 2
