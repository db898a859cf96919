"""The requests of the paging benchmark are the paper's, and its charts show what they are given."""

import math
from xml.etree import ElementTree

import pytest

from bench.kv.chart import Bar, stacked
from bench.kv.live import Seen
from bench.kv.traces import CONTEXT, TRACES
from bench.paging import CONTIGUOUS, paged
from blockstore.store import HolderInfo
from services.advisor.memory import ContiguousMemory
from services.advisor.simulation import simulate
from services.advisor.workload import Asked
from services.common.ticket import place_in_line


@pytest.mark.parametrize(
    ("name", "prompt", "output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)]
)
def test_lengths_have_the_means_of_the_paper(name: str, prompt: float, output: float) -> None:
    asked = TRACES[name].requests(20_000, seed=1)
    means = (
        sum(each.num_prompt_tokens for each in asked) / len(asked),
        sum(each.num_generated_tokens for each in asked) / len(asked),
    )
    assert means == pytest.approx((prompt, output), rel=0.04)
    assert max(each.num_tokens for each in asked) <= CONTEXT


def test_sharegpts_outputs_spread_as_figure_2_says() -> None:
    """E[o^2] / (2 E[o]): what a request that runs has before it, on average."""
    outputs = [each.num_generated_tokens for each in TRACES["sharegpt"].requests(50_000, seed=1)]
    ahead = sum(o * o for o in outputs) / sum(outputs) / 2
    assert ahead == pytest.approx(2048 * 13.3 / 91.1, rel=0.05)
    assert TRACES["sharegpt"].output.sigma == pytest.approx(
        math.sqrt(math.log(2 * 2048 * 13.3 / 91.1 / 337.99)), abs=0.001
    )


def test_the_same_seed_draws_the_same_requests() -> None:
    trace = TRACES["alpaca"]
    assert trace.requests(10, seed=3) == trace.requests(10, seed=3) != trace.requests(10, seed=4)


@pytest.mark.parametrize(("output", "reserved"), [(25, 7 + 32), (32, 7 + 32), (33, 7 + 64)])
def test_powers_of_two_are_the_papers(output: int, reserved: int) -> None:
    """Its example: for an output of 25 tokens 32 positions."""
    assert CONTIGUOUS["power of two"](Asked(7, output)) == reserved


async def test_paging_comes_to_what_the_paper_has() -> None:
    """96.3 % of what vLLM reserves holds KV, by its Figure 2, of OPT-13B's 15,728 slots; of what
    Orca (Max) does 20.4 of 91.1 %. Paging is what lets four times as many run at once."""
    asked = TRACES["sharegpt"].requests(300, seed=0)
    whole = await simulate(asked, ContiguousMemory(15_728, CONTIGUOUS["longest possible"]))
    blocks = await paged(asked, 15_728, 16)
    assert blocks.utilization >= 0.96
    assert whole.utilization == pytest.approx(0.204 / 0.911, abs=0.03)
    assert whole.most_running == 7
    assert blocks.most_running >= 4 * whole.most_running


def test_a_chart_has_a_rectangle_for_each_share() -> None:
    bars = [Bar("a & b", {"KV": 0.75, "tail": 0.25}), Bar("c", {"KV": 0.5, "tail": 0.1})]
    svg = ElementTree.fromstring(stacked("<title>", bars))
    heights = [
        float(each.attrib["height"])
        for each in svg.iter("{http://www.w3.org/2000/svg}rect")
        if each.attrib["width"] == "56"
    ]
    assert heights == [180.0, 60.0, 120.0, 24.0]
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<title>", "a & b", "75.0"} <= set(texts)


def test_a_sample_of_a_live_pool_by_hand() -> None:
    """Blocks of 16: two streams of 20 and 32 tokens with 3 blocks each, and a holder of 2 blocks
    without a token yet."""
    orders = {"late": (7, 2), "a": (5, 3), "b": (6, 3)}
    holders = [
        HolderInfo(name, 1, "w", place_in_line(0, arrival), num_blocks)
        for name, (arrival, num_blocks) in orders.items()
    ]
    seen = Seen()
    seen.add(16, holders, {5: 20, 6: 32, 8: 100})
    assert (seen.reserved, seen.kv, seen.tail, seen.in_prefill, seen.ahead) == (128, 52, 12, 32, 32)
    assert seen.cells() == ["40.6 %", "40.6 %", "9.4 %", "25.0 %", "25.0 %", "3.0"]
    assert seen.num_odd == 0
    seen.add(16, holders, {5: 50, 6: 32})
    assert seen.num_odd == 1
