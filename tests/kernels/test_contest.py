"""The choice between instruction sets: its rule on given times, and a real measurement."""

from collections.abc import Sequence

import pytest

from kvops import contest
from kvops.native import Kind, emulated_kernels, usable_kernels


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ([(1.0, 1.0), (8.0, 8.0)], "a"),
        ([(1.22, 1.0), (8.7, 8.0)], "b"),
        ([(1.10, 1.0), (8.8, 8.0)], "b"),
        # Not clearly faster: noise.
        ([(1.04, 1.0), (8.3, 8.0)], "a"),
        # Twice as fast with few rows is worth more than a fifth slower with many.
        ([(1.0, 2.0), (9.6, 8.0)], "a"),
        ([(1.0, 1.9), (4.0, 8.0)], "a"),
        # Three: the first of those that are about as fast as the fastest.
        ([(1.0, 1.5, 1.2), (1.0, 9.0, 8.0)], "a"),
        ([(2.0, 1.5, 1.2), (20.0, 9.0, 8.0)], "c"),
        ([(2.0, 1.2, 1.2), (20.0, 8.1, 8.0)], "b"),
        ([(1.05, 1.0, 1.0), (8.2, 8.0, 8.1)], "a"),
    ],
)
def test_the_first_set_that_none_clearly_beats_wins(
    timings: Sequence[Sequence[float]], expected: str
) -> None:
    named = {str(number): times for number, times in enumerate(timings)}
    assert contest.winner("abc"[: len(timings[0])], named) == expected


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4-64"])
def test_a_set_that_takes_many_times_as_long_loses(kind: Kind) -> None:
    """The real kernels of the last set of this CPU's list are portable and several times as
    slow."""
    best, portable = usable_kernels()[0], usable_kernels()[-1]
    if best == portable:
        pytest.skip("this CPU has one instruction set alone")
    shape = contest.ModelShape(kind, ((256, 128), (96, 300)), 4, 2, 32)
    for isas in ((portable, best), (best, portable)):
        timings = contest.measure(isas, shape, limit_s=0.01)
        assert contest.winner(isas, timings) == best
        assert set(timings) == {
            *(f"linears of {rows} rows" for rows in contest.ROWS),
            "decode attention",
            "prompt attention",
        }


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        (["portable"], ()),
        (["avx2", "portable"], ("avx2",)),
        (["avx512", "avx2", "portable"], ("avx512", "avx2")),
        (
            ["amx", "avx512_bf16", "avx512", "avx2", "portable"],
            ("amx", "avx512_bf16", "avx512", "avx2"),
        ),
    ],
)
def test_all_sets_but_the_portable_one_compete(
    usable: list[str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "usable_kernels", lambda: usable)
    assert contest.contenders() == expected


def test_sets_with_the_same_results_are_told_from_others() -> None:
    for isa in [*usable_kernels(), *emulated_kernels()]:
        assert contest.same_results(isa, isa)
    if emulated_kernels():
        assert not contest.same_results("amx_emulated", "avx2")
