"""The choice between instruction sets: its rule on made-up times, and a real measurement."""

import pytest

from kvops import contest
from kvops.native import usable_kernels


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ([(1.0, 1.0), (8.0, 8.0)], False),
        ([(1.22, 1.0), (8.7, 8.0)], True),
        ([(1.10, 1.0), (8.8, 8.0)], True),
        # Not clearly faster: noise.
        ([(1.04, 1.0), (8.3, 8.0)], False),
        # Twice as fast with few rows is worth more than a fifth slower with many.
        ([(1.0, 2.0), (9.6, 8.0)], False),
        ([(1.0, 1.9), (4.0, 8.0)], False),
    ],
)
def test_the_second_one_is_chosen_where_it_is_clearly_faster(
    timings: contest.Timings, expected: bool
) -> None:
    assert contest.second_is_faster(timings) is expected


def test_a_set_that_takes_many_times_as_long_loses() -> None:
    """Real kernels: the last ones of this CPU's list are portable, and several times as slow."""
    best, portable = usable_kernels()[0], usable_kernels()[-1]
    if best == portable:
        pytest.skip("this CPU has one instruction set alone")
    assert contest.second_is_faster(contest.measure((portable, best)))
    assert not contest.second_is_faster(contest.measure((best, portable)))


def test_there_is_a_contest_only_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable in (["avx2", "portable"], ["avx512", "avx2", "portable"]):
        monkeypatch.setattr(contest, "usable_kernels", lambda usable=usable: usable)
        assert contest.contenders() is None
    every = ["avx512_bf16", "avx512", "avx2", "portable"]
    monkeypatch.setattr(contest, "usable_kernels", lambda: every)
    assert contest.contenders() == ("avx512_bf16", "avx512")
