"""The figures of `quire bench` on literal requests; docs/bench.md has the definitions."""

import itertools
import statistics

import pytest

from quire.bench.record import Record, percentile
from quire.bench.summary import summarize, warnings
from quire.bench.workload import poisson


def record(sent: float, *arrivals: float, tokens: int | None = None, due: float = -1) -> Record:
    """A complete request; each arrival is one token, unless the server reports `tokens`."""
    return Record(
        sent if due < 0 else due,
        sent,
        [sent + at for at in arrivals],
        counts=[1] * len(arrivals),
        num_prompt_tokens=100,
        num_reported=tokens,
    )


def failed(sent: float, kind: str) -> Record:
    return Record(sent, sent, [sent + 5.0], error=kind, message=f"it was {kind}")


def test_latencies_of_one_request() -> None:
    """The first token comes after 0.5 s, the next after 0.1 s and 0.3 s; the last chunk has two
    tokens."""
    found = summarize([record(2.0, 0.5, 0.6, 0.9, tokens=4)], 10.0, {})
    assert found["ttft_ms"]["mean"] == pytest.approx(500)
    assert found["e2e_ms"]["mean"] == pytest.approx(900)
    assert found["tpot_ms"]["mean"] == pytest.approx(400 / 3)
    assert (found["itl_ms"]["mean"], found["itl_ms"]["max"]) == pytest.approx((200, 300))
    assert found["output_token_throughput"] == pytest.approx(0.4)
    assert found["total_token_throughput"] == pytest.approx(10.4)
    assert found["request_throughput"] == pytest.approx(0.1)
    assert found["goodput"] is None


def test_a_single_token_has_no_tpot_and_no_gap() -> None:
    found = summarize([record(0.0, 0.5)], 1.0, {"tpot": 1.0})
    assert found["tpot_ms"] is found["itl_ms"] is None
    assert found["goodput"] == 1.0


def test_goodput_needs_every_limit() -> None:
    quick, slow_start, slow_decode = (
        record(0.0, 0.1, 0.2),
        record(0.0, 0.9, 1.0),
        record(0.0, 0.1, 0.9),
    )
    found = summarize([quick, slow_start, slow_decode], 2.0, {"ttft": 500, "tpot": 200})
    assert found["goodput"] == 0.5
    assert summarize([quick, slow_start], 2.0, {"e2e": 500})["goodput"] == 0.5


def test_failed_requests_count_as_errors_only() -> None:
    requests = [record(0.0, 0.1, 0.2), failed(0.0, "timeout"), failed(0.1, "http 429")]
    found = summarize([*requests, failed(0.2, "timeout")], 1.0, {"ttft": 1000})
    assert found["errors"] == {"timeout": 2, "http 429": 1}
    assert found["error_messages"]["timeout"] == "it was timeout"
    assert (found["num_requests"], found["num_completed"]) == (4, 1)
    assert found["e2e_ms"]["max"] == pytest.approx(200)
    assert found["goodput"] == 1.0
    assert warnings(found) == ["3 requests failed; the latencies leave them out"]


def test_requests_that_are_cut_off_count_with_their_tokens_only() -> None:
    cut = Record(0.0, 0.0, [0.1, 0.5], [1, 1], failed_at=1.0, is_cut=True)
    found = summarize([record(0.0, 0.1, 0.2), cut, cut], 1.0, {"e2e": 1000})
    assert (found["num_requests"], found["num_completed"], found["num_cut"]) == (3, 1, 2)
    assert (found["num_output_tokens"], found["errors"], found["goodput"]) == (6, {}, 1.0)
    assert found["e2e_ms"]["max"] == pytest.approx(200)
    assert "leave out 2 that were cut off" in warnings(found)[0]


def test_a_late_generator_is_warned_about() -> None:
    found = summarize([record(1.5, 0.1, due=1.0)], 2.0, {})
    assert found["lateness_ms"]["p50"] == pytest.approx(500)
    assert "500 ms late" in warnings(found)[0]


def test_requests_that_run_at_once_are_counted() -> None:
    found = summarize([record(0.0, 1.0), record(0.5, 1.0), record(1.0, 1.0)], 2.0, {})
    assert found["max_concurrency"] == 2


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)]
)
def test_percentiles_are_numpys(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(value)


def test_poisson_arrivals_have_the_rate_and_its_randomness() -> None:
    times = list(itertools.islice(poisson(20.0, 0.0, seed=1), 4000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[-1] == pytest.approx(200, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)
    assert times[:5] == list(itertools.islice(poisson(20.0, 0.0, seed=1), 5))


def test_a_ramp_raises_the_rate_in_a_straight_line() -> None:
    """From 0 to 20 a second in 100 s: 1,000 arrivals, a quarter of them in the first half."""
    times = list(itertools.takewhile(lambda at: at < 200, poisson(20.0, 100.0, seed=2)))
    assert sum(at < 100 for at in times) == pytest.approx(1000, rel=0.1)
    assert sum(at < 50 for at in times) == pytest.approx(250, rel=0.2)
    assert sum(at >= 100 for at in times) == pytest.approx(2000, rel=0.1)
