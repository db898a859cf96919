"""Applies the masks of grammars where the logits are.

A draw with a mask gets a row of logits of its own, behind those of the states: other draws and the
logprobs of its state use the logits as they are.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.model.structured.mask import Mask


def with_masked_rows(logits: Tensor, rows: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """The logits [N, vocab_size], and behind them row `rows[i]` with -inf where `masks[i]` excludes
    the token; None excludes all. A row that is not finite becomes NaN, which no mask hides."""
    words = -(-logits.shape[1] // 32)
    empty = np.zeros(words, np.int32)
    packed = np.stack([empty if mask is None else mask[:words] for mask in masks])
    bits = torch.from_numpy(packed).to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    may_come = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    chosen = logits.index_select(0, rows)
    is_finite = chosen.amax(dim=-1, keepdim=True).isfinite()
    excluded = torch.where(is_finite, float("-inf"), float("nan"))
    return torch.cat([logits, torch.where(may_come, chosen, excluded)])
