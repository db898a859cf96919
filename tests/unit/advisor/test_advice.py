"""Recommendations for workloads whose right answer is known."""

from dataclasses import replace

import pytest

from advisor.advice import (
    BLOCK_SIZES,
    RecordedRequest,
    SizeCosts,
    advise,
    shared_tokens,
    size_costs,
)

EVEN = dict.fromkeys(BLOCK_SIZES, 100.0)
"""Attention that is as fast with blocks of every size."""

SLOW: dict[str, float] = {"attention_share": 0.3, "token_us": 3000.0}
"""A step beside which the store's time is negligible."""


def costs(block_size: int, **changes: float) -> SizeCosts:
    """The costs of a block size that wastes nothing."""
    whole = SizeCosts(
        block_size,
        utilization=1.0,
        tail=0.0,
        look_ahead=0.0,
        num_at_once=1.0,
        mean_context=1.0,
        blocks_per_request=1.0,
        store_calls_per_token=0.0,
        store_us_per_token=0.0,
        lost_tokens=0.0,
        prefix_efficiency=1.0,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def of_workload(asked: list[RecordedRequest]) -> list[SizeCosts]:
    """The costs as `quire advise` counts them, on a pool for 64 of these requests."""
    num_slots = 64 * sum(each.num_tokens for each in asked) // len(asked) // 256 * 256
    return [size_costs(asked, num_slots, size, 1 << 14) for size in BLOCK_SIZES]


def test_short_answers_want_small_blocks() -> None:
    """20 tokens in and 20 out: half of a block of 32 would stay empty."""
    found = of_workload([RecordedRequest(20, 20)] * 200)
    assert advise(found, EVEN, **SLOW).block_size == 8


def test_a_prefix_that_fits_no_large_block_wants_small_ones() -> None:
    """Prompts share 120 of their 130 tokens, and the answer has one: computing the prompt is almost
    the whole cost, and blocks of 64 would compute 56 of the 120 again."""
    found = of_workload([RecordedRequest(130, 1, 0.0, "all", 120)] * 200)
    lost = {cost.block_size: cost.lost_tokens for cost in found}
    assert lost[8] == 0
    assert lost[64] == pytest.approx(56, rel=0.01)  # all but the first prompt's
    assert advise(found, EVEN, **SLOW).block_size == 8


def test_long_contexts_with_fast_steps_want_large_blocks() -> None:
    """8,000 tokens in: the waste of the last block is negligible, and a token takes about as long
    as the store's calls for one block."""
    found = of_workload([RecordedRequest(8000, 400)] * 8)
    assert advise(found, EVEN, attention_share=0.9, token_us=10.0).block_size >= 64


def test_long_contexts_want_what_attention_is_fast_with() -> None:
    faster = EVEN | {8: 160.0, 16: 130.0, 32: 110.0}
    found = of_workload([RecordedRequest(8000, 400)] * 8)
    advice = advise(found, faster, attention_share=0.6, token_us=3000.0)
    assert advice.block_size == 64
    assert "32 instead: memory +" in advice.reasons[1]
    assert "attention -5." in advice.reasons[1]


def test_parts_equal_hand_computed_values() -> None:
    """Attention is 40 % of a step and takes a quarter longer; the store takes 10 of 100 us."""
    found = [costs(16), costs(32, utilization=0.9, prefix_efficiency=0.8, store_us_per_token=10.0)]
    advice = advise(found, {16: 100.0, 32: 125.0}, attention_share=0.4, token_us=90.0)
    shares = advice.shares[32]
    assert (shares["memory"], shares["prefix"], shares["store"]) == (0.9, 0.8, 0.9)
    assert shares["attention"] == pytest.approx(1 / 1.1)
    assert advice.left[32] == pytest.approx(0.9 * 0.8 * 0.9 / 1.1)
    assert advice.left[16] == 1.0
    assert advice.block_size == 16
    assert advice.reasons == (
        "16 leaves 100.0% of the machine",
        "32 instead: memory -10.0%, prefix -20.0%, attention -9.1%, store -10.0%: -41.1%",
    )


def test_equal_timings_choose_the_smaller() -> None:
    found = [costs(16), costs(32), costs(64, utilization=0.9)]
    times = {16: 100.5, 32: 100.0, 64: 100.0}
    advice = advise(found, times, attention_share=1.0, token_us=1.0)
    assert advice.block_size == 16
    assert advice.reasons[-1] == "32 is ahead by 0.5%, which timings do not tell from nothing"


def test_a_clearly_better_choice_is_taken() -> None:
    times = {16: 106.0, 32: 100.0}
    advice = advise([costs(16), costs(32)], times, attention_share=1.0, token_us=1.0)
    assert advice.block_size == 32


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
    found = size_costs(asked, 256, 16, 1)
    assert found.lost_tokens == pytest.approx(28 / 3)
    assert found.prefix_efficiency == pytest.approx(72 / 100)
    every = size_costs(asked, 256, 1, 1)
    assert (every.lost_tokens, every.prefix_efficiency) == (0.0, 1.0)


def test_slots_equal_hand_computed_ones() -> None:
    """A prompt of 4 and 3 tokens more in blocks of 4, two blocks in each of three steps:

    KV    4  5  6
    tail  0  3  2
    ahead 4  0  0   slots

    The store is asked for the blocks, commits the first one, and gets both back.
    """
    found = size_costs([RecordedRequest(4, 3)], 64, 4, 1)
    assert (found.utilization, found.tail, found.look_ahead) == (15 / 24, 5 / 24, 4 / 24)
    assert (found.num_at_once, found.mean_context, found.blocks_per_request) == (1, 5, 2)
    assert found.store_calls_per_token == 1
