"""The rotary embeddings that ModelConfig reads from a checkpoint's config.json."""

import math
from pathlib import Path
from typing import Any

import pytest

from services.model.config.model_config import ModelConfig
from services.model.config.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    YarnScaling,
)
from services.runtime.errors import StartupError

from .config_files import LLAMA3, LONGROPE, read


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_rope_scaling_has_two_equal_spellings(tmp_path: Path, kind: str) -> None:
    old = read(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3 | {kind: "llama3"})
    new = read(
        tmp_path,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0},
    )
    assert (
        old.ropes[0] == new.ropes[0] == RopeConfig(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    )


def test_linear_and_default_rope(tmp_path: Path) -> None:
    linear = read(tmp_path, rope_scaling={"type": "linear", "factor": 4})
    assert linear.ropes[0] == RopeConfig(1_000_000.0, LinearScaling(4.0))
    default = read(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert default.ropes[0] == RopeConfig(7.0)


def scaling_of(config: ModelConfig) -> object:
    """The scaling of all layers."""
    (rope,) = set(config.ropes)
    assert rope is not None
    return rope.scaling


def test_yarn_rope_has_bounds_and_a_magnitude(tmp_path: Path) -> None:
    """As Qwen publishes it: the pairs that turn 32 times and once in 32,768 positions."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    magnitude = 0.1 * math.log(4) + 1
    scaling = YarnScaling(4.0, 23, 40, magnitude)
    assert read(tmp_path, rope_scaling=yarn).ropes[0] == RopeConfig(1_000_000.0, scaling)
    fields = yarn | {"attention_factor": 1.5, "truncate": False}
    exact = scaling_of(read(tmp_path, rope_scaling=fields))
    assert isinstance(exact, YarnScaling)
    assert (round(exact.low, 3), round(exact.high, 3), exact.magnitude) == (23.596, 39.651, 1.5)


def test_dynamic_rope_is_plain_within_the_models_context(tmp_path: Path) -> None:
    dynamic = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.ropes[0] == RopeConfig(1_000_000.0)


def test_longrope_depends_on_the_workers_context(tmp_path: Path) -> None:
    """No other rope does."""
    config = read(tmp_path, rope_scaling=LONGROPE)
    scaling = scaling_of(config)
    assert isinstance(scaling, LongScaling)
    assert scaling.magnitude == math.sqrt(1 + math.log(10) / math.log(4096))
    assert config.for_context(4096).max_position_embeddings == 4096
    assert config.for_context(None) == config
    plain = read(tmp_path)
    assert plain.for_context(4096) == plain
    with pytest.raises(StartupError, match="max_model_len 40961 is beyond the model's context of"):
        plain.for_context(40961)


def test_original_context_beside_the_rope_has_precedence(tmp_path: Path) -> None:
    """As in Phi-3."""
    config = read(tmp_path, rope_scaling=LONGROPE, original_max_position_embeddings=2048)
    scaling = scaling_of(config)
    assert isinstance(scaling, LongScaling)
    assert scaling.original_max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 4 * 40960),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4 * 40960),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None}
            | {"original_max_position_embeddings": 32768},
            131072,
        ),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768}}, 40960),
        (
            {"max_position_embeddings": 131072}
            | {"rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000}}
            | {"original_max_position_embeddings": 4096},
            131072,
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, 40960),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, 40960),
        ({"rope_scaling": LONGROPE}, 40960),
    ],
)
def test_yarn_and_linear_ropes_extend_the_context(
    tmp_path: Path, changes: dict[str, Any], context: int
) -> None:
    assert read(tmp_path, **changes).max_position_embeddings == context
