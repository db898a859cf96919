"""What the figures of a load mean, on requests with literal times."""

import math

import pytest

from bench.serving.record import Arrival, Record, decode_rate, percentiles_ms, summarize


def record(sent: float, *arrivals: tuple[float, int]) -> Record:
    return Record(sent, [Arrival(at, num_tokens) for at, num_tokens in arrivals])


def test_latencies_are_of_arrivals() -> None:
    """Tokens that come together have one gap before them."""
    seen = record(1.0, (1.5, 1), (1.6, 3), (1.8, 1))
    assert seen.ttft_s == 0.5
    assert seen.gaps_s == pytest.approx([0.1, 0.2])
    assert seen.num_tokens == 5


def test_tokens_that_waited_for_a_slow_client_came_together() -> None:
    """A client that got no CPU for a while reads several messages in microseconds: no gaps."""
    seen = Record(0.0)
    for now in (1.0, 1.00001, 1.00009, 1.002, 1.00201):
        seen.add(1, now)
    assert seen.arrivals == [Arrival(1.0, 3), Arrival(1.002, 2)]


def test_decode_is_measured_while_all_streams_decode() -> None:
    """From 2.0, when the second has its first token, to 5.0, when the first has its last: 3 tokens
    of the first and 2 + 1 of the second."""
    first = record(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1))
    second = record(0.0, (2.0, 1), (3.0, 2), (5.0, 1), (6.0, 1), (7.0, 1))
    assert decode_rate([first, second]) == (3 + 3) / 3.0


def test_streams_that_never_run_side_by_side_have_no_decode_rate() -> None:
    assert math.isnan(decode_rate([record(0.0, (1.0, 1), (2.0, 1)), record(0.0, (3.0, 1))]))


@pytest.mark.parametrize(
    ("seen", "meets"),
    [
        (record(0.0, (4.9, 1), (5.0, 1)), True),
        (record(0.0, (5.0, 1), (5.1, 1)), False),  # the first token is late
        (record(0.0, (1.0, 1), (1.1, 1), (1.26, 1)), False),  # one gap is long
        (record(0.0), False),
        (Record(0.0, [Arrival(1.0, 1)], error="broken off"), False),
    ],
)
def test_the_slo_is_of_the_first_token_and_every_gap(seen: Record, meets: bool) -> None:
    assert seen.meets_slo is meets


def test_percentiles_are_interpolated() -> None:
    assert percentiles_ms([n / 1000 for n in range(101)]) == pytest.approx((50, 90, 99))
    assert percentiles_ms([0.2]) == (200, 200, 200)
    assert all(math.isnan(value) for value in percentiles_ms([]))


def test_a_failed_request_counts_as_failed_and_with_nothing_else() -> None:
    answered = record(0.0, (1.0, 1), (2.0, 1))
    failed = Record(0.0, [Arrival(9.0, 1)], error="broken off")
    figures = summarize([answered, failed])
    assert (figures.requests, figures.failed) == (2, 1)
    assert figures.tokens_per_s == 2 / 2.0
    assert figures.worst_gap_ms == 1000


def test_figures_of_no_answer_are_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match="no worker"):
        summarize([Record(0.0, [], error="no worker")])
