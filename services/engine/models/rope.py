"""Rotary position embeddings: plain, scaled linearly, as in Llama 3, or by given
divisors."""

import math

import torch
from torch import Tensor

from services.common.text.rope_config import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
)


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency, [num_positions, head_dim / 2] each, fp32.

    The table is computed once, so a position's angles have the same bits in any batch. All numbers
    are fp32, as in transformers, so angles at far positions are rounded in the same way.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(rope, head_dim))
    return angles.cos(), angles.sin()


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i / head_dim) for i < head_dim / 2, then scaled; fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FrequencyDivisors(divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale each frequency by the number of turns that it makes within the original context: below
    `low_freq_factor` turns divide it by `factor`, above `high_freq_factor` keep it, and interpolate
    linearly between the two (as the reference implementation of Llama 3.1)."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / band).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
