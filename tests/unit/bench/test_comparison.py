"""Ratios are of medians, to the best peer."""

import pytest

from bench.serving.comparison import Comparison, Row
from bench.serving.report import shown

RATE = Row("decode", "higher")
GAP = Row("gap", "lower")


@pytest.fixture
def comparison() -> Comparison:
    result = Comparison("ours", ["one", "two"])
    for value in (30.0, 10.0, 20.0):
        result.add("ours", RATE, value)
    for name, value in (("one", 8.0), ("two", 10.0)):
        result.add(name, RATE, value)
    for name, value in (("ours", 3.0), ("one", 2.0), ("two", 4.0)):
        result.add(name, GAP, value)
    return result


def test_the_best_peer_is_the_highest_or_the_lowest(comparison: Comparison) -> None:
    assert comparison.ratio(RATE) == 20 / 10
    assert comparison.ratio(GAP) == 3 / 2


def test_one_contestant_alone_has_no_ratio() -> None:
    comparison = Comparison("ours", ["one"])
    comparison.add("ours", RATE, 1.0)
    assert comparison.ratio(RATE) is None
    comparison.add("one", GAP, 1.0)
    assert comparison.ratio(GAP) is None


def test_references_are_shown_and_no_ratio_counts_them() -> None:
    comparison = Comparison("ours", ["one"], ["ours in int8"])
    for name, value in (("ours", 20.0), ("ours in int8", 40.0), ("one", 10.0)):
        comparison.add(name, RATE, value)
    assert comparison.table().splitlines() == [
        "|  | ours | ours in int8 | one | ratio | better |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| decode | 20 | 40 | 10 | 2.00x | higher |",
    ]


def test_the_table_shows_median_and_spread(comparison: Comparison) -> None:
    assert comparison.table().splitlines() == [
        "|  | ours | one | two | ratio | better |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| decode | 20 (10-30) | 8 | 10 | 2.00x | higher |",
        "| gap | 3 | 2 | 4 | 1.50x | lower |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (99.96, "100"), (3.0, "3"), (0.12345, "0.123"), (float("nan"), "-")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert shown(value) == text
