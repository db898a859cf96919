"""One step of beam search, by hand: a vocabulary of 10 tokens, of which 9 ends a sequence."""

from typing import Any

import pytest

from services.engine.sequences.beam import FIRST, Beam, BeamSearch, Continuation, num_candidates
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import BeamParams, EarlyStopping, FinishReason, Hypothesis

EOS = 9


def search(
    width: int = 2, max_tokens: int = 8, stop_ids: tuple[int, ...] = (EOS,), **params: Any
) -> BeamSearch:
    return BeamSearch(BeamParams(width, width, **params), frozenset(stop_ids), max_tokens)


def candidates(**logprobs: float) -> Logprobs:
    """`t7=-1.0` is token 7."""
    ids = tuple(int(name[1:]) for name in logprobs)
    return Logprobs(0.0, 1, ids, tuple(logprobs.values()))


def ended(*token_ids: int, score: float, finish: FinishReason = FinishReason.STOP) -> Hypothesis:
    return Hypothesis(token_ids, score, finish)


def test_a_search_begins_with_the_likeliest_tokens() -> None:
    step = search().step([FIRST], (), [candidates(t4=-0.5, t2=-1.0, t7=-2.0)])
    assert step.living == (Continuation(0, 4, -0.5), Continuation(0, 2, -1.0))
    assert step.finished == ()


def test_a_beam_forks_and_another_dies() -> None:
    beams = [Beam((4,), -0.5), Beam((2,), -3.0)]
    step = search().step(beams, (), [candidates(t1=-0.5, t3=-1.0), candidates(t1=-0.25, t3=-0.5)])
    assert step.living == (Continuation(0, 1, -1.0), Continuation(0, 3, -1.5))


def test_equal_scores_are_ordered_by_beam_then_by_token() -> None:
    beams = [Beam((4,), -1.0), Beam((2,), -1.0)]
    step = search(width=3).step(
        beams, (), [candidates(t5=-1.0, t3=-1.0), candidates(t1=-1.0, t0=-1.0)]
    )
    assert [(branch.parent, branch.token_id) for branch in step.living] == [(0, 3), (0, 5), (1, 0)]


def test_beams_that_end_within_the_width_are_hypotheses_and_others_live_on() -> None:
    step = search(length_penalty=2.0).step(
        [Beam((4,), -1.0), Beam((2,), -2.0)],
        (),
        [candidates(t9=-1.0, t3=-2.0, t5=-3.0), candidates(t1=-2.5, t0=-4.0, t2=-5.0)],
    )
    assert step.finished == (ended(4, 9, score=-2.0 / 2**2),)
    assert step.living == (Continuation(0, 3, -3.0), Continuation(0, 5, -4.0))


def test_hypotheses_that_end_behind_the_width_are_dropped() -> None:
    step = search().step(
        [Beam((4,), -1.0), Beam((2,), -1.0)],
        (),
        [candidates(t3=-1.0, t9=-2.0, t5=-3.0), candidates(t1=-1.5, t0=-4.0, t2=-5.0)],
    )
    assert step.finished == ()
    assert step.living == (Continuation(0, 3, -2.0), Continuation(1, 1, -2.5))


def test_the_best_hypotheses_are_kept_of_equals_the_older_one() -> None:
    old = [ended(1, EOS, score=-1.0), ended(2, EOS, score=-2.0)]
    step = search(length_penalty=0.0, early_stopping=EarlyStopping.WHEN_IMPOSSIBLE).step(
        [Beam((4, 4), -0.5), Beam((2, 2), -0.75)],
        old,
        [candidates(t9=-0.5, t3=-1.0, t5=-3.0), candidates(t1=-0.75, t0=-4.0, t2=-5.0)],
    )
    assert step.finished == (old[0], ended(4, 4, EOS, score=-1.0))


def test_all_beams_end_at_max_tokens() -> None:
    step = search(max_tokens=2, length_penalty=0.0).step(
        [Beam((4,), -1.0), Beam((2,), -2.0)],
        (),
        [candidates(t3=-1.0, t9=-1.5, t5=-3.0), candidates(t1=-2.0, t0=-4.0, t2=-5.0)],
    )
    assert step.living == ()
    assert step.finished == (
        ended(4, 3, score=-2.0, finish=FinishReason.LENGTH),
        ended(4, EOS, score=-2.5),
    )


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "goes_on"),
    [
        (EarlyStopping.WHEN_FULL, 1.0, False),
        # The best beam has -3.0 after 3 tokens: -1.0 a token, and 8 tokens are allowed.
        (EarlyStopping.WHEN_UNLIKELY, 1.0, False),
        (EarlyStopping.WHEN_IMPOSSIBLE, 1.0, True),
        (EarlyStopping.WHEN_IMPOSSIBLE, 0.0, False),
        (EarlyStopping.WHEN_IMPOSSIBLE, -1.0, False),
    ],
)
def test_a_full_search_ends_by_early_stopping(
    early_stopping: EarlyStopping, length_penalty: float, goes_on: bool
) -> None:
    """There are hypotheses of -0.5 and -0.75; a beam would have to reach more than -0.75."""
    step = search(length_penalty=length_penalty, early_stopping=early_stopping).step(
        [Beam((4, 4), -2.0), Beam((2, 2), -2.0)],
        [ended(1, EOS, score=-0.5), ended(2, EOS, score=-0.75)],
        [candidates(t3=-1.0, t5=-2.0, t9=-3.0), candidates(t1=-1.5, t0=-4.0, t2=-5.0)],
    )
    assert bool(step.living) is goes_on
    assert [one.score for one in step.finished] == [-0.5, -0.75]


def test_a_search_that_may_still_improve_goes_on() -> None:
    step = search().step(
        [Beam((4, 4), -2.0), Beam((2, 2), -2.0)],
        [ended(1, EOS, score=-0.5), ended(2, EOS, score=-1.25)],
        [candidates(t3=-1.0, t5=-2.0, t9=-3.0), candidates(t1=-1.5, t0=-4.0, t2=-5.0)],
    )
    assert step.living == (Continuation(0, 3, -3.0), Continuation(1, 1, -3.5))


def test_stop_tokens_need_one_candidate_more_each() -> None:
    assert num_candidates(BeamParams(4, 4), frozenset((3, 9))) == 6
    assert num_candidates(BeamParams(4, 4), frozenset()) == 4
