"""Angles of rotary position embeddings, plain, interpolated linearly, or scaled as Llama 3's."""

import math

import torch
from torch import Tensor

from services.common.text.model_config import LinearScaling, Llama3Scaling, RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency, [num_positions, head_dim / 2] each, fp32.

    A table, computed once: a position's angles are the same bits in whichever batch it comes. All
    in fp32, as in transformers, whose angles at far positions carry the same rounding.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(rope, head_dim))
    return angles.cos(), angles.sin()


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i / head_dim) for i < head_dim / 2, scaled; fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """How many turns a frequency makes within the original context decides: below low_freq_factor
    it is divided by `factor`, above high_freq_factor it stays, and between it moves over linearly
    (Llama 3.1's reference implementation)."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / band).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
