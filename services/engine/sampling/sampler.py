"""The sampler: adjusts the logits of each row (`services.engine.sampling.adjustment`), then takes
the likeliest token, or filters the tokens and draws one.

Temperature, min_p, top_k and top_p apply in this order, which is vLLM's, each to what the one
before leaves. Each filter is a threshold on the scaled logits: tokens that tie at the threshold
stay together, and nothing depends on how a sort breaks ties.

A draw is an exponential race in two rounds. First, chunks of 64 tokens race: chunk c finishes at
time E_c / W_c, where E_c is exponential and W_c the sum of its tokens' weights. The first chunk
wins, with probability W_c / sum(W). Then its tokens race: token i finishes at E_i / w_i. So a token
wins with probability w_i / sum(w), and a draw needs few random numbers: one per chunk. Weights are
whole numbers (`services.engine.sampling.arithmetic`), so that no sum depends on an order.

A race is stable against noise: if the last bit of one probability changes, all other tokens keep
their share of the random numbers. A draw by the cumulative distribution would move the shares of
all later tokens. Noise of 1e-6 in the logits changes about one draw in a million. Each row is
computed alone, in an order of its own, so its token does not depend on the rest of the batch.

See ADR 12.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, from_numpy

from services.engine.sampling.adjustment import masked
from services.engine.sampling.arithmetic import exponentials, weights
from services.engine.sampling.logprobs import score_tensors
from services.engine.sampling.philox import uniforms
from services.engine.sampling.sampling_batch import NOT_FINITE, SamplingBatch
from services.model.structured.mask import Mask

_LOGITS_AT_ONCE = 600_000  # keeps the temporaries in the cache: 2.4 MB
_CHUNK = 64  # tokens that race as one in the first round
_NUCLEUS_WIDTH = 1024  # top_p ranks so many tokens, and all only if it needs more

Columns = Mapping[str, Tensor]
"""The parameters of some draws, [N, 1] each."""


def draw(logits: Tensor, batch: SamplingBatch, masks: Sequence[Mask | None]) -> Sequence[Tensor]:
    """The tokens of the draws, and the scores of those that ask for them, as
    `sampling_batch.Outputs` has them. `logits` are fp32 [states that draw, vocab_size]."""
    tokens = sample(logits[batch.states].cpu(), batch, masks)
    if not batch.scored:
        return (tokens,)
    rows, told = logits[[batch.states[i] for i in batch.scored]], tokens[batch.scored].clamp(min=0)
    return tokens, *score_tensors(rows, told.to(logits.device), batch.num_top)


def sample(logits: Tensor, batch: SamplingBatch, masks: Sequence[Mask | None] = ()) -> Tensor:
    """The tokens of the draws, int64; NOT_FINITE if a row's logits are not finite. `logits` are
    fp32 [D, vocab_size] on the CPU, a row for each draw.

    Temperature 0 takes the largest logit, and the lowest id of equal ones. Rows are checked for
    finite logits before any adjustment, since a mask would hide a broken row.
    """
    tokens = greedy(logits)
    logits = _adjusted(logits, batch, masks or [None] * len(batch.draws), tokens)
    drawn = ((from_numpy(batch.columns["temperature"]) > 0) & (tokens >= 0)).nonzero().flatten()
    num_rows = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for rows in torch.split(drawn, num_rows) if len(drawn) else ():
        left = filtered_weights(logits[rows], batch, rows)
        tokens[rows] = _winners(left, rows.tolist(), batch)
    return tokens


def greedy(logits: Tensor) -> Tensor:
    """The argmax of each row. A NaN or +inf anywhere in a row is its largest logit, and so the row
    is not finite; a -inf does no harm."""
    largest, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(~largest.isfinite(), NOT_FINITE)


def _adjusted(
    logits: Tensor, batch: SamplingBatch, masks: Sequence[Mask | None], tokens: Tensor
) -> Tensor:
    """The adjusted logits, copied if they differ. Writes each adjusted row's argmax to `tokens`."""
    adjusted = {}
    for row, (one, mask, token) in enumerate(zip(batch.draws, masks, tokens.tolist(), strict=True)):
        if token == NOT_FINITE or (one.adjustment is None and mask is None):
            continue
        adjusted[row] = logits[row] if mask is None else masked(logits[row], mask)
        if one.adjustment is not None:
            adjusted[row] = one.adjustment.applied(adjusted[row])
    if not adjusted:
        return logits
    logits, rows = logits.clone(), list(adjusted)
    logits[rows] = torch.stack(list(adjusted.values()))
    tokens[rows] = greedy(logits[rows])
    return logits


def filtered_weights(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """The weights that the filters leave (`arithmetic.weights`), 0 for all other tokens. int64 [N,
    vocab_size]. `rows` are the draws of the N rows, all with temperatures above 0."""
    columns = {name: from_numpy(array)[rows, None] for name, array in batch.columns.items()}
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / columns["temperature"]
    scaled.masked_fill_(scaled < columns["least"], float("-inf"))  # the largest is 0
    left, top_k = weights(scaled), columns["top_k"]
    for chosen, keep in (
        ((top_k > 0) & (top_k < logits.shape[1]), _keep_top_k),
        (columns["top_p"] < 1, _keep_top_p),
    ):
        if len(some := chosen.flatten().nonzero().flatten()):
            of_some = {name: column[some] for name, column in columns.items()}
            left[some] = keep(scaled[some], left[some], of_some)
    return left


def _keep_top_k(scaled: Tensor, left: Tensor, columns: Columns) -> Tensor:
    top_k = columns["top_k"].long()
    likeliest = scaled.topk(int(top_k.max())).values
    return left.masked_fill_(scaled < likeliest.gather(1, top_k - 1), 0)


def _keep_top_p(scaled: Tensor, left: Tensor, columns: Columns) -> Tensor:
    """The likeliest tokens, up to the first with which they have top_p of the weight that is left.

    Each row ranks only its likeliest tokens. Rows whose nucleus reaches further are computed again
    over the whole vocabulary, with the same result for what the first ones ranked.
    """
    vocab_size = scaled.shape[1]
    wanted = (columns["top_p"] * left.sum(dim=1, keepdim=True).double()).ceil().long()
    width = min(vocab_size, _NUCLEUS_WIDTH)
    thresholds, open_rows = _nucleus_within(width, scaled, left, wanted)
    if width < vocab_size and len(open_rows):
        thresholds[open_rows], _ = _nucleus_within(
            vocab_size, scaled[open_rows], left[open_rows], wanted[open_rows]
        )
    return left.masked_fill_(scaled < thresholds, 0)


def _nucleus_within(
    width: int, scaled: Tensor, left: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """The least scaled logits of the nuclei, among the `width` likeliest tokens, and the rows that
    need more tokens."""
    values, token_ids = scaled.topk(width)
    likeliest = left.gather(1, token_ids)
    is_kept = likeliest.cumsum(dim=1) - likeliest < wanted
    num_kept = is_kept.sum(dim=1, keepdim=True)  # at least 1: nothing is before the first
    return values.gather(1, num_kept - 1), (num_kept == width).squeeze(1).nonzero().squeeze(1)


def _winners(left: Tensor, rows: Sequence[int], batch: SamplingBatch) -> Tensor:
    """Return the token that each row draws. `rows` are the indices of the rows' draws in the batch.
    The first _CHUNK random numbers are for the tokens of the winning chunk, the others for the
    chunks. A token with the weight 0 never finishes; the first of several equal times wins."""
    num_chunks = -(-left.shape[1] // _CHUNK)
    padded = F.pad(left, (0, num_chunks * _CHUNK - left.shape[1]))
    chunks = padded.view(len(rows), num_chunks, _CHUNK)
    numbers = []
    for row in rows:
        one = batch.draws[row]
        key = one.sampling.seed, one.sequence_index, batch.positions[row]
        numbers.append(uniforms(*key, _CHUNK + num_chunks))
    times = exponentials(torch.stack(numbers))
    won = (times[:, _CHUNK:] / chunks.sum(dim=-1).float()).argmin(dim=-1)
    within = (times[:, :_CHUNK] / chunks[torch.arange(len(rows)), won].float()).argmin(dim=-1)
    return won * _CHUNK + within
