"""How long a prefill step waits for more prompts."""

import pytest

from services.engine.prefill_batching_delay import PrefillBatchingDelay


def batching_delay(ms_per_token: float = 4.0) -> PrefillBatchingDelay:
    made = PrefillBatchingDelay(max_num_batched_tokens=512)
    for num_tokens in (100, 200):
        made.observe(num_tokens, num_tokens * ms_per_token / 1000)
    return made


def test_no_prompt_waits_on_a_guess() -> None:
    assert PrefillBatchingDelay(512).delay_s(64, 0.0) == 0.0


def test_a_step_waits_for_a_fortieth_of_its_time_at_most() -> None:
    """40 tokens take 160 ms: the step waits 4 ms, in one wait or several."""
    made = batching_delay()
    assert made.delay_s(40, 0.0) == pytest.approx(0.004)
    assert made.delay_s(40, 0.003) == pytest.approx(0.001)
    assert made.delay_s(40, 0.004) == 0.0


def test_the_batch_begins_after_5_ms_without_arrivals() -> None:
    """256 tokens take 1 s, so the step waits up to 25 ms, as long as prompts keep arriving."""
    made = batching_delay()
    assert made.delay_s(256, 0.0) == 0.005
    assert made.delay_s(256, 0.018) == 0.005


def test_arrivals_extend_the_delay() -> None:
    made = batching_delay()
    assert made.delay_s(40, 0.005) == 0.0
    assert made.delay_s(80, 0.005) == pytest.approx(0.003)


def test_a_full_step_waits_for_nobody() -> None:
    made = batching_delay()
    assert made.delay_s(511, 0.0) > 0.0
    assert made.delay_s(512, 0.0) == 0.0


def test_short_steps_do_not_wait_and_nothing_does_not_either() -> None:
    """Less than 0.3 ms is not worth a wait."""
    made = batching_delay(ms_per_token=0.1)
    assert made.delay_s(100, 0.0) == 0.0
    assert made.delay_s(0, 0.0) == 0.0


def test_the_last_steps_say_how_long_they_take() -> None:
    made = batching_delay()
    made.observe(0, 1.0)
    assert made.delay_s(40, 0.0) == pytest.approx(0.004)
    for num_tokens in (30, 60) * 40:
        made.observe(num_tokens, num_tokens * 0.002)
    assert made.delay_s(40, 0.0) == pytest.approx(0.002, rel=0.01)


def test_a_step_is_not_expected_to_be_longer_than_a_longer_one() -> None:
    """Steps of one size say little of others: a longer one is taken for one of them."""
    made = PrefillBatchingDelay(512)
    made.observe(40, 0.16)
    assert made.delay_s(40, 0.0) == pytest.approx(0.004)
    assert made.delay_s(400, 0.0) == pytest.approx(0.004)
    assert made.delay_s(20, 0.0) == pytest.approx(0.002)


@pytest.mark.parametrize("num_tokens", [8, 64, 400])
def test_a_gpu_waits_for_a_fortieth_of_its_steps_too(num_tokens: int) -> None:
    """A step takes 14 ms and 0.02 ms a token: a wait raises the time to the first token by 2.5 % at
    most. Taken as 14 ms for each 8 tokens, 400 tokens would wait 5 ms, a quarter of their time."""
    made = PrefillBatchingDelay(512)
    for seen in (8, 64, 16, 300, 8, 8):
        made.observe(seen, 0.014 + 0.00002 * seen)
    assert made.delay_s(num_tokens, 0.0) <= (0.014 + 0.00002 * num_tokens) / 39
