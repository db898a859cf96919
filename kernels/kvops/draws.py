"""The arguments of a device's sampler, as tensors on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """The parameters of Q draws, [Q] each."""

    state: Tensor
    """The row of the logits."""
    temperature: Tensor
    least: Tensor
    """The least scaled logit that min_p leaves."""
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    sequence_index: Tensor
    position: Tensor
    slot: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    has_top_k: bool
    has_top_p: bool


DRAW_DTYPES = {
    **dict.fromkeys(("state", "top_k", "slot"), torch.int32),
    **dict.fromkeys(("seed", "sequence_index", "position"), torch.int64),
    **dict.fromkeys(("temperature", "least", "repetition", "frequency", "presence"), torch.float32),
    "top_p": torch.float64,
}

NOT_ALLOWED, BANNED = 1, 2


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """The tables that change the logits of the draws with a slot, [slots, vocab_size] each."""

    biases: Tensor  # fp32
    counts: Tensor
    """1 + the number of a token in the output, or 0 if no penalty affects the token; int32."""
    flags: Tensor
    """The bits `NOT_ALLOWED` and `BANNED`, int8. Bans that would leave no token do not hold."""
