"""Impossible logprobs of requested tokens."""

import pytest

from services.gateway.request.tickets import logprobs_problem
from services.protocol.logprobs import Logprobs

VOCAB = 300


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [
        (Logprobs(-1.0, 300, (5, 299), (-0.5, -1.0)), ""),
        (Logprobs(-1.0, 301, (5, 6), (-0.5, -1.0)), "not all are in the vocabulary of 300"),
        (Logprobs(-1.0, 1, (5, 300), (-0.5, -1.0)), "not all are in the vocabulary of 300"),
        (Logprobs(-1.0, 1, (5, 5), (-0.5, -1.0)), "a token twice"),
        (Logprobs(-1.0, 1, (5,), (-0.5,)), "1 of the 2 likeliest tokens"),
        (Logprobs(-1.0, 1, (5, 6, 7), (-0.5,) * 3), "3 of the 2 likeliest tokens"),
        (Logprobs(-1.0, 1), "0 of the 2 likeliest tokens"),
    ],
)
def test_invalid_logprobs_are_described(logprobs: Logprobs, problem: str) -> None:
    assert logprobs_problem(logprobs, 2, VOCAB) == problem


def test_a_small_vocabulary_is_reported_whole() -> None:
    assert logprobs_problem(Logprobs(-1.0, 3, (2, 0, 1), (-0.5, -1.0, -1.0)), 20, 3) == ""
