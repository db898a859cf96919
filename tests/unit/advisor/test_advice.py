"""Recommendations for workloads whose right answer is known."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from advisor.advice import BLOCK_SIZES, SizeCosts, StepTime, advise, prefix_costs, shared_tokens
from advisor.costs import replay, size_costs
from advisor.store_cost import counted_us
from advisor.workload import RecordedRequest

SLOW = StepTime(attention_share=0.3, token_us=3000.0)
"""Step times beside which the store's time is negligible."""


def costs(block_size: int, **changes: float) -> SizeCosts:
    """The costs of a block size that wastes nothing."""
    whole = SizeCosts(
        block_size,
        utilization=1.0,
        tail=0.0,
        look_ahead=0.0,
        num_at_once=1.0,
        num_preemptions=0,
        blocks_per_request=1.0,
        store_calls_per_token=0.0,
        store_us_per_token=0.0,
        lost_tokens=0.0,
        prefix_efficiency=1.0,
        attention_us=100.0,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


async def of_workload(
    asked: list[RecordedRequest], attention_us: Mapping[int, float] | None = None
) -> list[SizeCosts]:
    """The costs as `quire advise` computes them, on a pool for 64 of these requests; the store's
    calls are counted."""
    num_slots = 64 * sum(each.num_tokens for each in asked) // len(asked) // 256 * 256
    num_generated = sum(each.num_generated_tokens for each in asked)
    found = []
    for size in BLOCK_SIZES:
        replayed = await replay(asked, num_slots, size, 1 << 14)
        store_us = counted_us(replayed.num_calls, replayed.num_blocks) / num_generated
        us = (attention_us or {}).get(size, 100.0)
        found.append(size_costs(asked, size, replayed, us, store_us))
    return found


async def test_short_answers_want_small_blocks() -> None:
    """20 tokens in and 20 out: half of a block of 32 would stay empty."""
    found = await of_workload([RecordedRequest(20, 20)] * 200)
    assert advise(found, SLOW).block_size == 8


async def test_a_prefix_that_fits_no_large_block_wants_small_ones() -> None:
    """Prompts share 120 of their 130 tokens, and the answer has one: computing the prompt is almost
    the whole cost, and blocks of 64 would compute 56 of the 120 again."""
    found = await of_workload([RecordedRequest(130, 1, 0.0, "all", 120)] * 200)
    lost = {cost.block_size: cost.lost_tokens for cost in found}
    assert lost[8] == 0
    assert lost[64] == pytest.approx(56, rel=0.01)  # all but the first prompt's
    assert advise(found, SLOW).block_size == 8


async def test_long_contexts_with_fast_steps_want_large_blocks() -> None:
    """8,000 tokens in: the waste of the last block is negligible, and a token takes about as long
    as the store's calls for one block."""
    found = await of_workload([RecordedRequest(8000, 400)] * 8)
    assert advise(found, StepTime(attention_share=0.9, token_us=10.0)).block_size >= 64


async def test_long_contexts_want_what_attention_is_fast_with() -> None:
    faster = {8: 160.0, 16: 130.0, 32: 110.0, 64: 100.0}
    found = await of_workload([RecordedRequest(8000, 400)] * 8, faster)
    advice = advise(found, StepTime(attention_share=0.6, token_us=3000.0))
    assert advice.block_size == 64
    assert "32 instead: memory +" in advice.reasons[1]
    assert "attention -5." in advice.reasons[1]


def test_parts_equal_hand_computed_values() -> None:
    """Attention is 40 % of a step and takes a quarter longer; the store takes 10 of 100 us."""
    found = [
        costs(16),
        costs(
            32, utilization=0.9, prefix_efficiency=0.8, attention_us=125.0, store_us_per_token=10.0
        ),
    ]
    advice = advise(found, StepTime(attention_share=0.4, token_us=90.0))
    shares = advice.shares[32]
    assert (shares.memory, shares.prefix, shares.store) == (0.9, 0.8, 0.9)
    assert shares.attention == pytest.approx(1 / 1.1)
    assert shares.product == pytest.approx(0.9 * 0.8 * 0.9 / 1.1)
    assert advice.shares[16].product == 1.0
    assert advice.block_size == 16
    assert advice.reasons == (
        "16 leaves 100.0% of the machine",
        "32 instead: memory -10.0%, prefix -20.0%, attention -9.1%, store -10.0%: -41.1%",
    )


def test_equal_timings_choose_the_smaller() -> None:
    found = [
        costs(16, attention_us=100.5),
        costs(32, attention_us=100.0),
        costs(64, utilization=0.9),
    ]
    advice = advise(found, StepTime(attention_share=1.0, token_us=1.0))
    assert advice.block_size == 16
    assert advice.reasons[-1] == "32 is ahead by 0.5%, which timings do not tell from nothing"


def test_a_clearly_better_choice_is_taken() -> None:
    found = [costs(16, attention_us=106.0), costs(32, attention_us=100.0)]
    assert advise(found, StepTime(attention_share=1.0, token_us=1.0)).block_size == 32


def test_only_what_an_earlier_prompt_had_is_shared() -> None:
    asked = [
        RecordedRequest(50, 1, 0.0, "a", 40),
        RecordedRequest(50, 1, 1.0, "b", 30),
        RecordedRequest(50, 1, 2.0, "a", 45),  # 40 of them were there
        RecordedRequest(50, 1, 3.0, "a", 45),
        RecordedRequest(45, 1, 4.0, "a", 45),  # its last one is computed
        RecordedRequest(50, 1, 5.0),
        RecordedRequest(50, 1, 6.0),
    ]
    assert shared_tokens(asked) == [0, 0, 40, 45, 44, 0, 0]


def test_prefixes_are_lost_to_whole_blocks() -> None:
    """Two requests share 30 of 40 tokens, of which blocks of 16 hold 16: 14 are computed again
    twice, beside the 40 + 10 + 10 tokens and 4 answers each that must be computed."""
    asked = [RecordedRequest(40, 4, 0.0, "a", 30)] * 3
    lost, efficiency = prefix_costs(asked, 16)
    assert lost == pytest.approx(28 / 3)
    assert efficiency == pytest.approx(72 / 100)
    assert prefix_costs(asked, 1) == (0.0, 1.0)
