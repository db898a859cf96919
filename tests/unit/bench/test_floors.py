"""The parts of a step's floor, in small numbers."""

import dataclasses
from pathlib import Path

import pytest

from bench.floors import Rates, Work, decode_step, prefill_of
from bench.make_checkpoint import SHAPES, make_checkpoint
from services.common.text.model_config import ModelConfig

RATES = Rates(read=100.0, bf16=1000.0, int8=4000.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """One layer: qkv and output 4 x (4 + 2 + 2 + 4), feed-forward 3 x 4 x 6, head 10 x 4."""
    directory = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"])
    return dataclasses.replace(
        ModelConfig.from_directory(Path(directory)),
        hidden_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=6,
        vocab_size=10,
    )


def test_a_decode_step_reads_every_weight_once_and_each_rows_context(config: ModelConfig) -> None:
    """Weights: 48 + 72 + 40. A position: a key and a value of 2 in bf16, 16 operations."""
    work = decode_step(config, num_rows=3, context=5, quantize=None)
    assert work == Work(num_bytes=2 * 160 + 3 * 5 * 8, bf16=3 * (2 * 160 + 5 * 16))


def test_int8_halves_the_weights_and_leaves_attention(config: ModelConfig) -> None:
    work = decode_step(config, num_rows=3, context=5, quantize="int8")
    assert work == Work(num_bytes=160 + 3 * 5 * 8, bf16=3 * 5 * 16, int8=3 * 2 * 160)


def test_int4_has_four_bits_and_a_half_in_layers_and_eight_in_the_head(config: ModelConfig) -> None:
    work = decode_step(config, num_rows=1, context=0, quantize="int4")
    assert work == Work(num_bytes=120 * 4.5 / 8 + 40, bf16=0, int8=2 * 160)


def test_a_prompt_pays_for_what_it_sees_and_for_one_row_of_logits(config: ModelConfig) -> None:
    work = prefill_of(config, num_tokens=4, quantize=None)
    assert work == Work(num_bytes=2 * 160, bf16=2 * (120 * 4 + 40) + 16 * (1 + 2 + 3 + 4))


@pytest.mark.parametrize(
    ("work", "seconds"),
    [(Work(500.0, 100.0), 5.0), (Work(1.0, 2000.0), 2.0), (Work(1.0, 1000.0, 8000.0), 3.0)],
    ids=["memory", "arithmetic", "of both kinds"],
)
def test_the_floor_is_what_takes_longer(work: Work, seconds: float) -> None:
    assert work.floor_s(RATES) == seconds


def test_without_an_instruction_there_is_no_floor() -> None:
    with pytest.raises(ValueError, match="dot products"):
        Work(1.0, 0.0, 1.0).floor_s(Rates(1.0, 1.0, 0.0))
