"""Draws whose rows of logits are there already, as the tests of samplers make them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.batch import Draw
from services.engine.sampling import sampler
from services.engine.sampling.sampling_batch import SamplingBatch
from services.model.structured.mask import Mask
from services.protocol.ticket import SamplingParams


def batch_of(draws: Sequence[Draw], positions: Sequence[int]) -> SamplingBatch:
    """A batch whose draw i is after state i."""
    places = range(len(draws))
    return SamplingBatch(draws, positions, places, (), places, places)


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    masks: Sequence[Mask | None] = (),
) -> list[int]:
    """The reference's token for each row; -1: its logits are not finite."""
    tokens: list[int] = sampler.sample(logits, batch_of(draws, positions), masks).tolist()
    return tokens


def filtered_weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    batch = batch_of([Draw(p, 0) for p in params], [0] * len(params))
    return sampler.filtered_weights(logits, batch, torch.arange(len(params)))
