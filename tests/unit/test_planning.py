"""Loads and the workers that the planner recommends for them."""

import pytest

from blockstore.registry import Load
from quire.planning import divided, held_share, plan_decode, plan_prefill

IDLE_DECODE = Load(num_free_slots=10)
FULL = Load(num_running=10, num_free_slots=0, step_us=20_000)


def prefill(busy: float = 0.0, pending: int = 0) -> Load:
    return Load(num_pending_tokens=pending, busy_permille=round(1000 * busy), tokens_per_s=1000)


def recommended(prefills: list[Load], decodes: list[Load], **more: float) -> tuple[int, int]:
    decode = plan_decode(decodes, **more)  # type: ignore[arg-type]
    return plan_prefill(prefills).recommended, decode.recommended


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
    found = plan_decode([slow] * 2)
    assert found.needed == pytest.approx(5)
    assert found.recommended == 4
    assert found.reason == "a step took 250 ms (target 100 ms)"


def test_full_pools_need_more_pods() -> None:
    found = plan_decode([Load(num_running=1, num_free_slots=9)] * 3, held_share=0.99)
    assert found.recommended == 4
    assert "requests held 99% of the blocks" in found.reason
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
    assert divided(plan_prefill(prefills), plan_decode(decodes), total) == ratio
