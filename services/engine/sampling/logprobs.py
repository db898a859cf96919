"""Logprobs: the logprob and rank of a given token, and the likeliest tokens of its position.

This module is the definition. `kernels/csrc/sampling/scorer.cpp` computes the same for CPUs; there
the order of a row's operations depends on nothing but the size of the vocabulary (law 10).
"""

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import Fault
from services.protocol.logprobs import LogprobColumns, Logprobs

ScoreTensors = tuple[Tensor, Tensor, Tensor]
"""Token ids [N, 1 + k] int64, with the given token in column 0; their logprobs [N, 1 + k] fp32; and
ranks [N] int64, where rank 0 marks a row that is not finite."""


def score_tensors(logits: Tensor, token_ids: Tensor, num_top: int) -> ScoreTensors:
    """The scores of `token_ids[i]` in row i, with the `num_top` likeliest tokens of that row, at
    most the vocabulary. They are computed where the logits are; nothing waits for a device.

    logits: fp32 [N, vocab_size]. The logarithm of the sum is computed in double precision.
    """
    vocab_size = logits.shape[1]
    asked = token_ids.unsqueeze(1)
    largest = logits.amax(dim=-1, keepdim=True)
    log_sum = (logits - largest).double().exp().sum(dim=-1, keepdim=True).log()
    ranks = 1 + (logits > logits.gather(1, asked)).sum(dim=-1)
    order = _order_keys(logits).topk(min(num_top, vocab_size), dim=-1).indices
    told = torch.cat([asked, order], dim=1)
    logprobs = ((logits.gather(1, told) - largest).double() - log_sum).float()
    is_finite = largest.isfinite().squeeze(1)
    return told, logprobs, torch.where(is_finite, ranks, 0)


def _order_keys(logits: Tensor) -> Tensor:
    """Whole numbers, all different, in the order of the logits: among equal ones the lowest token
    id is first."""
    bits = (logits + 0.0).view(torch.int32)  # 0 for -0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) - torch.arange(logits.shape[1], device=logits.device)


def scores_of(token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> list[Logprobs | Fault]:
    """`ScoreTensors` as `Logprobs`. A row whose logits are not finite gets a fault."""
    rows = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [
        Logprobs(values[0], rank, tuple(ids[1:]), tuple(values[1:])) if rank else Fault.NOT_FINITE
        for ids, values, rank in rows
    ]


def columns_of(token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> LogprobColumns | Fault:
    """`ScoreTensors` on the host as columns of their own, or a fault if the logits of any row are
    not finite."""
    if not ranks.all():
        return Fault.NOT_FINITE
    values, top_ids = logprobs.numpy(), token_ids[:, 1:].numpy().astype(np.uint32)
    return LogprobColumns(
        values[:, 0].copy(), ranks.numpy().astype(np.uint32), top_ids, values[:, 1:].copy()
    )
