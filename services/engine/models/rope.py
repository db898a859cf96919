"""Rotary position embeddings: plain, or scaled as `services.model.config.rope_config` defines."""

import math

import torch
from torch import Tensor

from services.model.config.model_config import ModelConfig
from services.model.config.rope_config import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    YarnScaling,
)


def rope_tables(config: ModelConfig) -> dict[RopeConfig, tuple[Tensor, Tensor]]:
    """For each rotation of the model's layers, cosines and sines of position * frequency,
    [positions, rotated dimensions / 2] each, fp32.

    A table is computed once, so a position's angles have the same bits in any batch. All numbers
    are fp32, as in transformers, so angles at far positions are rounded in the same way.
    """
    length = config.max_position_embeddings
    ropes = dict.fromkeys(rope for rope in config.ropes if rope is not None)
    return {rope: _tables(rope, rope.width or config.head_dim, length) for rope in ropes}


def _tables(rope: RopeConfig, width: int, num_positions: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(rope, width, num_positions))
    if isinstance(rope.scaling, YarnScaling | LongScaling):
        magnitude = rope.scaling.magnitude
        return angles.cos() * magnitude, angles.sin() * magnitude
    return angles.cos(), angles.sin()


def _frequencies(rope: RopeConfig, width: int, num_positions: int) -> Tensor:
    """theta^(-2i / width) for i < width / 2, then scaled; fp32."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    wavelengths = rope.theta**exponents
    frequencies = 1.0 / wavelengths
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FrequencyDivisors(divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(wavelengths, rope.scaling)
        case LongScaling(short, long, original):
            divisors = short if num_positions <= original else long
            return 1.0 / (torch.tensor(divisors) * wavelengths)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale each frequency by the number of turns that it makes within the original context: below
    `low_freq_factor` turns divide it by `factor`, above `high_freq_factor` keep it, and interpolate
    linearly between the two (as the reference implementation of Llama 3.1)."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / band).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(wavelengths: Tensor, scaling: YarnScaling) -> Tensor:
    band = max(scaling.high - scaling.low, 0.001)
    pairs = torch.arange(len(wavelengths), dtype=torch.float32)
    scaled = ((pairs - scaling.low) / band).clamp(0.0, 1.0)
    kept = 1 - scaled
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
