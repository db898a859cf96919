"""The bench of the gateway alone plays both workers: it must keep up with what they say."""

from pathlib import Path

import pytest

from bench.gateway_relay import byte_model, measure


@pytest.mark.timeout(60)
def test_the_bench_of_the_gateway_relays_every_token(tmp_path: Path) -> None:
    row = measure(num_streams=2, num_tokens=16, step_s=0.001, model_dir=byte_model(tmp_path))
    assert row.startswith("| 2 | 16 | 1 |")
