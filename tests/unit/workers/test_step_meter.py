"""A worker's report of its last steps."""

from services.worker.step_meter import StepMeter
from tests.clock import Clock


def test_steps_of_the_last_seconds_are_measured() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    assert meter.figures() == {}
    for _ in range(10):  # half of each second in two steps of 100 tokens
        meter.add(0.25, 100)
        meter.add(0.25, 100)
        clock.now_s += 1
    found = meter.figures()
    assert found == {"busy_permille": 500, "step_us": 250_000, "tokens_per_s": 400}


def test_old_steps_are_forgotten() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.add(1.0, 100)
    clock.now_s += 60
    assert meter.figures() == {}
    meter.add(0.1, 50)
    assert meter.figures() == {"busy_permille": 10, "step_us": 100_000, "tokens_per_s": 500}
