"""The simulated cluster: the costs of a few requests by hand, and general properties."""

import json
from pathlib import Path

import pytest

from bench.cluster.costs import PREFILL_TOKENS_PER_S, decode_step_s
from bench.cluster.simulate import Served, Shape, Simulation
from bench.cluster.trace import Request, read

TOKENS = 1_000_000
SPLIT = Shape(2, TOKENS, 2, 1)
BOTH = Shape(1, TOKENS, 1, 0, 64)


def request(at: float, num_prompt_tokens: int, *hashes: int, num_generated: int = 11) -> Request:
    return Request(at, num_prompt_tokens, num_generated, hashes)


def run(shape: Shape, *requests: Request) -> list[Served]:
    return Simulation(shape).run(requests)


@pytest.mark.parametrize("shape", [SPLIT, BOTH])
def test_one_request_takes_its_prompt_and_its_steps(shape: Shape) -> None:
    (one,) = run(shape, request(5.0, 691))
    assert one.ttft_s == pytest.approx(691 / PREFILL_TOKENS_PER_S)
    assert one.inter_token_s == pytest.approx(decode_step_s(1))


def test_a_prompt_stops_no_sequence_of_a_split_worker() -> None:
    first, _ = run(SPLIT, request(0.0, 69), request(0.15, 6910))
    assert first.inter_token_s == pytest.approx(decode_step_s(1))


def test_a_prompt_slows_the_sequences_of_an_aggregated_worker() -> None:
    """Each step also computes 64 tokens of the prompt."""
    first, second = run(BOTH, request(0.0, 69), request(0.05, 6910))
    step_s = decode_step_s(1) + 64 / PREFILL_TOKENS_PER_S
    assert first.inter_token_s == pytest.approx(step_s)
    alone_s = 6910 / PREFILL_TOKENS_PER_S
    assert second.ttft_s == pytest.approx(alone_s + 10 * decode_step_s(1), rel=0.01)


def test_a_known_prefix_is_not_computed_again() -> None:
    first, second = run(SPLIT, request(0.0, 1024, 1, 2), request(9.0, 1536, 1, 2, 3))
    assert (first.num_missing, second.num_missing) == (1024, 512)


def test_a_full_pool_lets_requests_wait_and_forgets_old_prefixes() -> None:
    small = Shape(2, 1200, 2, 1)
    first, second, third = run(
        small, request(0.0, 1024, 1, 2), request(0.0, 1024, 3, 4), request(9.0, 1024, 1, 2)
    )
    assert second.first_token_s > first.ended_s
    assert third.num_missing == 1024


def test_all_requests_end(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 50 * n, "input_length": 700 + n, "output_length": n % 40, "hash_ids": [0, n]}
        for n in range(300)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    for shape in (Shape(16, 100_000, 8, 6), Shape(16, 100_000, 1, 0, 32)):
        served = Simulation(shape).run(read(trace, 2.0))
        assert all(one.request.arrived_s < one.first_token_s <= one.ended_s for one in served)
        assert all(one.ended_s < 10_000 for one in served)
