"""The expected duration of a request, from the durations of others."""

import pytest

from services.gateway.scheduling.forecast import Forecast


def test_without_samples_no_request_is_refused() -> None:
    forecast = Forecast()
    assert forecast.wait_s(1000, 0, now=5.0) == 0.0
    assert forecast.run_time_s(1000, ignore_eos=True) == 0.0


def test_slots_get_free_at_the_rate_of_littles_law() -> None:
    """With two slots and 10 s a request, a slot becomes free every 5 s: the fourth in the queue
    waits 20 s."""
    forecast = Forecast()
    for name in ("a", "b"):
        forecast.started(name, 0.0)
    forecast.ended("a", 100, 10.0)
    forecast.started("c", 10.0)
    assert forecast.wait_s(3, 0, now=10.0) == 20.0
    assert forecast.wait_s(3, 2, now=10.0) == 5.0  # two free slots: two of the four go at once
    assert forecast.wait_s(3, 4, now=10.0) == 0.0


def test_the_forecast_uses_the_age_of_running_requests() -> None:
    forecast = Forecast()
    forecast.started("quick", 0.0)
    forecast.ended("quick", 10, 1.0)
    forecast.started("slow", 1.0)
    assert forecast.wait_s(0, 0, now=1.5) == 1.0
    assert forecast.wait_s(0, 0, now=9.0) == 8.0


@pytest.mark.parametrize(
    ("max_tokens", "ignore_eos", "run_time_s"),
    [(None, False, 2.0), (40, False, 2.0), (5, False, 0.5), (40, True, 4.0)],
)
def test_the_run_time_is_forecast_from_max_tokens_or_the_mean(
    max_tokens: int | None, ignore_eos: bool, run_time_s: float
) -> None:
    """Other requests: 20 tokens in 2 s."""
    forecast = Forecast()
    forecast.started("one", 0.0)
    forecast.ended("one", 20, 2.0)
    assert forecast.run_time_s(max_tokens, ignore_eos=ignore_eos) == pytest.approx(run_time_s)


def test_a_preempted_request_is_no_sample() -> None:
    forecast = Forecast()
    forecast.started("one", 0.0)
    forecast.stopped("one")
    forecast.ended("one", 5, 100.0)
    assert forecast.num_running == 0
    assert forecast.run_time_s(None, ignore_eos=False) == 0.0


def test_only_the_last_64_count() -> None:
    forecast = Forecast()
    for number in range(65):
        forecast.started(number, 0.0)
        forecast.ended(number, 1, 100.0 if number == 0 else 1.0)
    assert forecast.run_time_s(1, ignore_eos=True) == pytest.approx(1.0)
