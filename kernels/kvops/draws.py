"""The arguments of a device's sampler, as tensors on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """The parameters of Q draws, [Q] each. `state`: the row of the logits. `temperature`: 0 chooses
    the likeliest token. `least`: the least scaled logit that min_p leaves."""

    state: Tensor
    temperature: Tensor
    least: Tensor
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
    """The tables that change the logits of the draws with a slot, [slots, vocab_size] each.

    `biases`: fp32. `counts`: int32, 1 + how often a token is in the output, 0 if the penalties do
    not affect it. `flags`: int8, `NOT_ALLOWED` and `BANNED`; bans do not hold if they would leave
    no token.
    """

    biases: Tensor
    counts: Tensor
    flags: Tensor
