"""The comparison of a stream with the expected answer accepts it whole, and finds each
difference."""

from dataclasses import replace

import pytest

from quire.types import Beam, Candidate, Delta, Sampling, TokenLogprobs
from tests.chaos.cases import Case, Said, cases
from tests.chaos.received import Fault, Heard


def told(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(Candidate(token_id, -0.5, 1, b"x"), ())


CASE = Case(
    "samples",
    "prompt",
    Sampling(n=2),
    (
        Said((1, 2, 3), "abc", "stop", "c", (told(1), told(2), told(3)), -1.5),
        Said((4,), "d", "length", None, (told(4),), None),
    ),
    prompt_logprobs=(told(9),),
)
FIRST = Delta("r1", 0, (1, 2), "ab", logprobs=(told(1), told(2)), prompt_logprobs=(told(9),))
OTHER = Delta("r1", 1, (4,), "d", "length", logprobs=(told(4),))
LAST = Delta("r1", 0, (3,), "c", "stop", "c", logprobs=(told(3),), score=-1.5)


def test_tokens_of_an_undisturbed_run_are_accepted() -> None:
    heard = Heard(CASE)
    for delta in (FIRST, OTHER, LAST):
        heard.take(delta)
    heard.check_end()
    assert heard.num_tokens == 4
    assert heard.num_messages == 3


@pytest.mark.parametrize(
    "wrong",
    [
        replace(LAST, token_ids=(4,)),
        replace(LAST, token_ids=(3, 5)),
        replace(LAST, token_ids=()),
        replace(LAST, text="d"),
        replace(LAST, text=""),
        replace(LAST, logprobs=(told(4),)),
        replace(LAST, logprobs=()),
        replace(LAST, finish_reason="length"),
        replace(LAST, stopped_by=None),
        replace(LAST, score=-1.4),
        replace(LAST, index=1),
        replace(LAST, index=2),
        replace(LAST, prompt_logprobs=(told(9),)),
        OTHER,
    ],
)
def test_anything_else_is_a_fault(wrong: Delta) -> None:
    heard = Heard(CASE)
    heard.take(FIRST)
    heard.take(OTHER)
    with pytest.raises(Fault):
        heard.take(wrong)


def test_an_end_before_the_end_is_a_fault() -> None:
    heard = Heard(CASE)
    heard.take(FIRST)
    heard.take(OTHER)
    with pytest.raises(Fault, match="2 of 3 and 1 of 1 tokens, and then the end"):
        heard.check_end()


def test_a_seed_gives_requests_of_every_kind() -> None:
    """A seed always gives the same requests, with groups and beam searches, and long ones for slow
    users."""
    first, again, other = (cases(seed) for seed in (1, 1, 2))
    assert first == again != other
    assert any(case.sampling.n > 1 and case.sampling.beam is None for case in first)
    assert {case.sampling.beam for case in first} > {None, Beam(4), Beam(1)}
    assert sum(case.is_long for case in first) == 2
