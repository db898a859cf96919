"""What changes a row's logits before anything is chosen from them: biases, penalties, masks.

In this order (vLLM's, where masks go first: nothing makes -inf anything else):

    bias        logit + bias
    repetition  of tokens in prompt or output: logit / penalty if above 0, else logit * penalty
    frequency   of tokens in the output: logit - penalty * how often
    presence    of tokens in the output: logit - penalty
    allowed     -inf for all others
    banned      -inf; where that leaves nothing at all, it is left out

A logit that a penalty would make infinite stops at the largest finite number.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Values = np.ndarray[tuple[int], np.dtype[np.float32]]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """Of one draw; its arrays hold until the sequence has the next token.

    `biased`: tokens, each once, with `biases`. `seen`: tokens, each once, that penalties look at,
    with `counts`, how often each is in the output. `allowed`: the only ones that may come; None:
    all. `banned`: those that may not, some perhaps twice.
    """

    biased: Ids
    biases: Values
    seen: Ids
    counts: Values
    repetition: float
    frequency: float
    presence: float
    allowed: Ids | None
    banned: Ids

    def applied(self, logits: Tensor) -> Tensor:
        """To fp32 logits [vocab_size] on the CPU, which stay as they are."""
        row = logits.clone()
        row[_tensor(self.biased)] += _tensor(self.biases)
        seen = _tensor(self.seen)
        row[seen] = self._penalized(row[seen])
        if self.allowed is not None:
            allowed = _tensor(self.allowed)
            row = torch.full_like(row, float("-inf")).index_copy_(0, allowed, row[allowed])
        masked = row.index_fill(0, _tensor(self.banned), float("-inf"))
        return row if bool((masked == float("-inf")).all()) else masked

    def _penalized(self, logits: Tensor) -> Tensor:
        counts = _tensor(self.counts)
        scaled = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        scaled = scaled.clamp(-_LARGEST, _LARGEST)
        scaled = scaled - self.frequency * counts
        scaled = torch.where(counts > 0, scaled - self.presence, scaled)
        return torch.where(logits == float("-inf"), logits, scaled)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array)
