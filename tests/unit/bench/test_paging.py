"""The requests of the paging benchmark are those of the paper, and its charts show their data."""

import math
from xml.etree import ElementTree

import pytest

from advisor.advice import DoesNotFit
from advisor.workload import RecordedRequest
from bench.kv.chart import Bar, stacked
from bench.kv.contiguous import ContiguousMemory
from bench.kv.simulation import simulate
from bench.kv.traces import CONTEXT, TRACES
from bench.paging import CONTIGUOUS, paged


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
    """E[o^2]

    (2 E[o]): the average number of tokens that a running request still needs.
    """
    outputs = [each.num_generated_tokens for each in TRACES["sharegpt"].requests(50_000, seed=1)]
    ahead = sum(o * o for o in outputs) / sum(outputs) / 2
    assert ahead == pytest.approx(2048 * 13.3 / 91.1, rel=0.05)
    assert TRACES["sharegpt"].output.sigma == pytest.approx(
        math.sqrt(math.log(2 * 2048 * 13.3 / 91.1 / 337.99)), abs=0.001
    )


def test_requests_of_a_seed_are_the_same() -> None:
    trace = TRACES["alpaca"]
    assert trace.requests(10, seed=3) == trace.requests(10, seed=3) != trace.requests(10, seed=4)


@pytest.mark.parametrize(("output", "reserved"), [(25, 7 + 32), (32, 7 + 32), (33, 7 + 64)])
def test_powers_of_two_are_the_papers(output: int, reserved: int) -> None:
    """The paper's example: 32 positions for an output of 25 tokens."""
    assert CONTIGUOUS["power of two"](RecordedRequest(7, output)) == reserved


async def test_contiguous_pieces_by_hand() -> None:
    """Pieces of 10 slots in 25: two requests of three at once. Of each 10 slots 4, 5 and 6 hold
    KV in its three steps, 2, 1 and 0 will, and 4 never do."""
    outcome = await simulate([RecordedRequest(4, 3)] * 3, ContiguousMemory(25, lambda _: 10))
    assert outcome.num_steps == 6
    assert outcome.mean_running == 1.5
    assert outcome.utilization == 45 / 90
    assert outcome.wasted == (9 / 90, 36 / 90)
    assert outcome.utilization_at_peak == 12 / 20


@pytest.mark.parametrize("reserved", [8, 40])
async def test_a_piece_is_neither_too_short_nor_longer_than_the_memory(reserved: int) -> None:
    with pytest.raises(DoesNotFit, match=f"for which {reserved} slots are reserved"):
        await simulate([RecordedRequest(8, 4)], ContiguousMemory(32, lambda _: reserved))


async def test_paging_comes_to_what_the_paper_has() -> None:
    """96.3 % of the memory that vLLM reserves holds KV, by the paper's Figure 2, of OPT-13B's
    15,728 slots; with Orca (Max) it is 20.4 of 91.1 %. So paging runs four times as many requests
    at once."""
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
