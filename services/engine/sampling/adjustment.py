"""Adjustments of a row's logits before a token is drawn: biases, penalties, masks.

They apply in this order:

    mask        -inf for the tokens that a grammar does not allow
    bias        logit + bias
    repetition  tokens in prompt or output: logit / penalty if above 0, else logit * penalty
    frequency   tokens in the output: logit - penalty * count
    presence    tokens in the output: logit - penalty
    allowed     -inf for all other tokens
    banned      -inf, unless that would leave no token at all

The results are vLLM's, although vLLM applies the masks first: no later step changes -inf. A logit
that a penalty would make infinite stops at the largest finite number.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, from_numpy

from services.model.structured.mask import Mask

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Values = np.ndarray[tuple[int], np.dtype[np.float32]]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """The adjustment of one draw. Its arrays are valid until the sequence gets its next token."""

    biased: Ids
    """Token ids, each once, with `biases`."""
    biases: Values
    seen: Ids
    """The token ids that penalties affect, each once, with `counts`."""
    counts: Values
    """How often each token of `seen` is in the output."""
    repetition: float
    frequency: float
    presence: float
    allowed: Ids | None
    """The only token ids that may be drawn; None allows all."""
    banned: Ids
    """The token ids that may not be drawn, some of them twice."""
    state: object = None
    """The owner of the adjustment. The adjustments of one owner differ in counts and bans alone:
    tokens are added to `seen`, and counts grow."""

    def applied(self, logits: Tensor) -> Tensor:
        """An adjusted copy of `logits`, fp32 [vocab_size] on the CPU, whose mask is applied."""
        row = logits.clone()
        row[from_numpy(self.biased)] += from_numpy(self.biases)
        seen = from_numpy(self.seen)
        row[seen] = self._penalized(row[seen])
        if self.allowed is not None:
            allowed = from_numpy(self.allowed)
            row = torch.full_like(row, float("-inf")).index_copy_(0, allowed, row[allowed])
        masked = row.index_fill(0, from_numpy(self.banned), float("-inf"))
        return row if bool((masked == float("-inf")).all()) else masked

    def _penalized(self, logits: Tensor) -> Tensor:
        counts = from_numpy(self.counts)
        scaled = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        scaled = scaled.clamp(-_LARGEST, _LARGEST)
        scaled = scaled - self.frequency * counts
        scaled = torch.where(counts > 0, scaled - self.presence, scaled)
        return torch.where(logits == float("-inf"), logits, scaled)


def masked(logits: Tensor, mask: Mask) -> Tensor:
    """A copy of `logits` [vocab_size] that is -inf for the tokens that the mask excludes."""
    bits = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
    return logits.masked_fill(~from_numpy(bits).bool(), float("-inf"))
