"""How long a prefill step waits for more prompts."""

from services.engine.prefill_batching_delay import PrefillBatchingDelay


def batching_delay(ms_per_token: float = 4.0) -> PrefillBatchingDelay:
    made = PrefillBatchingDelay(max_num_batched_tokens=512)
    made.observe(100, 0.1 * ms_per_token)
    return made


def test_no_prompt_waits_on_a_guess() -> None:
    assert PrefillBatchingDelay(512).delay_s(64, 0.0) == 0.0


def test_a_step_waits_for_a_fortieth_of_its_time_at_most() -> None:
    """40 tokens take 160 ms: the step waits 4 ms, in one wait or several."""
    made = batching_delay()
    assert made.delay_s(40, 0.0) == 0.004
    assert made.delay_s(40, 0.003) == 0.001
    assert made.delay_s(40, 0.004) == 0.0


def test_the_batch_begins_after_5_ms_without_arrivals() -> None:
    """256 tokens take 1 s, so the step waits up to 25 ms, as long as prompts keep arriving."""
    made = batching_delay()
    assert made.delay_s(256, 0.0) == 0.005
    assert made.delay_s(256, 0.018) == 0.005


def test_arrivals_extend_the_delay() -> None:
    made = batching_delay()
    assert made.delay_s(40, 0.005) == 0.0
    assert made.delay_s(80, 0.005) == 0.003


def test_a_full_step_waits_for_nobody() -> None:
    made = batching_delay()
    assert made.delay_s(511, 0.0) > 0.0
    assert made.delay_s(512, 0.0) == 0.0


def test_short_steps_do_not_wait_and_nothing_does_not_either() -> None:
    """Less than 0.3 ms is not worth a wait."""
    made = batching_delay(ms_per_token=0.1)
    assert made.delay_s(100, 0.0) == 0.0
    assert made.delay_s(0, 0.0) == 0.0


def test_the_last_step_says_how_long_they_take() -> None:
    made = batching_delay()
    made.observe(0, 1.0)
    assert made.delay_s(40, 0.0) == 0.004
    made.observe(40, 0.08)
    assert made.delay_s(40, 0.0) == 0.002
