"""Loads and the workers that the planner recommends for them."""

import pytest

from blockstore.registry import Load
from quire.planning import Targets, held_share, mean, plan

TARGETS = Targets(ttft_s=1.0, inter_token_s=0.1, busy=0.8)
IDLE_DECODE = Load(num_free_slots=10)
FULL = Load(num_running=10, num_free_slots=0, step_us=20_000)


def prefill(busy: float = 0.0, pending: int = 0) -> Load:
    return Load(num_pending_tokens=pending, busy_permille=round(1000 * busy), tokens_per_s=1000)


def recommended(prefills: list[Load], decodes: list[Load], **more: float) -> tuple[int, int]:
    found = plan(prefills, decodes, TARGETS, **more)  # type: ignore[arg-type]
    return found.prefill.recommended, found.decode.recommended


def test_an_idle_model_keeps_one_worker_of_each_role() -> None:
    assert recommended([prefill()] * 3, [IDLE_DECODE] * 4) == (1, 1)


def test_long_prompts_need_prefill_workers() -> None:
    """2 workers that are always busy become 2.5; 5 s of pending tokens need 5, limited to
    double."""
    assert recommended([prefill(1.0)] * 2, [IDLE_DECODE]) == (3, 1)
    assert recommended([prefill(1.0, 2500)] * 2, [IDLE_DECODE]) == (4, 1)


def test_many_streams_need_decode_workers() -> None:
    assert recommended([prefill()], [FULL] * 2) == (1, 3)
    assert recommended([prefill()], [FULL] * 2, num_waiting=30) == (1, 4)


def test_slow_steps_need_decode_workers_before_the_slots_are_used() -> None:
    """10 of 20 slots are in use, but a worker may run 2 sequences in 100 ms."""
    slow = Load(num_running=5, num_free_slots=5, step_us=250_000)
    found = plan([prefill()], [slow] * 2, TARGETS)
    assert found.decode.needed == pytest.approx(5)
    assert found.decode.recommended == 4
    assert found.decode.reason == "a step took 250 ms (target 100 ms)"


def test_full_pools_need_more_pods() -> None:
    found = plan([prefill()], [Load(num_running=1, num_free_slots=9)] * 3, TARGETS, 0, 0.99)
    assert found.decode.recommended == 4
    assert "requests held 99% of the blocks" in found.decode.reason
    assert held_share([(9, 10), (90, 100)]) == pytest.approx(0.9)
    assert held_share([]) == 0


def test_a_worker_leaves_only_when_the_others_have_room() -> None:
    """Need 1.9 keeps 3 workers, need 1.7 does not."""
    assert recommended([prefill(0.51)] * 3, [IDLE_DECODE])[0] == 3
    assert recommended([prefill(0.45)] * 3, [IDLE_DECODE])[0] == 2


def test_unmeasured_workers_are_no_reason_for_more() -> None:
    """A worker that has made no step has no speed."""
    assert recommended([Load(num_pending_tokens=10_000)], [Load()]) == (1, 1)


@pytest.mark.parametrize(
    ("prefills", "decodes", "total", "ratio"),
    [
        ([prefill(0.8)], [FULL], 9, (4, 5)),
        ([prefill(0.1)], [FULL] * 2, 3, (1, 2)),
        ([prefill(1.0, 9000)], [IDLE_DECODE], 8, (7, 1)),
        ([prefill()], [IDLE_DECODE], 4, (2, 2)),
    ],
)
def test_a_total_is_divided_in_the_ratio_of_the_needs(
    prefills: list[Load], decodes: list[Load], total: int, ratio: tuple[int, int]
) -> None:
    assert plan(prefills, decodes, TARGETS).divided(total) == ratio


def test_a_plan_over_a_window_is_the_mean_of_its_samples() -> None:
    """One full second out of four does not start a worker."""
    busy, idle = plan([prefill(1.0)], [FULL], TARGETS), plan([prefill()], [IDLE_DECODE], TARGETS)
    found = mean([busy, idle, idle, idle])
    assert found.decode.needed == pytest.approx(1.25 / 4)
    assert found.prefill.recommended == found.decode.recommended == 1


def test_the_reason_of_a_plan_over_a_window_has_the_figures_of_the_whole_window() -> None:
    """Not those of its last, idle second."""
    busy, idle = plan([prefill(1.0)], [FULL], TARGETS), plan([prefill()], [IDLE_DECODE], TARGETS)
    found = mean([busy, idle, idle, idle]).prefill
    assert found.needed == pytest.approx(0.25 / 0.8)
    assert found.reason == "workers computed 25% of the time (target 80%)"
