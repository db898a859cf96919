"""The sampler: adjusts the logits of each row (`services.engine.sampling.adjustment`), then takes
the likeliest token, or filters the tokens and draws one.

Temperature, min_p, top_k and top_p apply in this order, which is vLLM's, each to what the one
before leaves. Each filter is a threshold on the scaled logits: tokens that tie at the threshold
stay together, and nothing depends on how a sort breaks ties.

A draw is an exponential race in two rounds. First, chunks of 64 tokens race: chunk c finishes at
time E_c / P_c, where E_c is exponential and P_c the sum of its tokens' probabilities. The first
chunk wins, with probability P_c / sum(P). Then its tokens race: token i finishes at E_i / p_i. So a
token wins with probability p_i / sum(p), and a draw needs few random numbers: one per chunk.

A race is stable against noise: if the last bit of one probability changes, all other tokens keep
their share of the random numbers. A draw by the cumulative distribution would move the shares of
all later tokens. Noise of 1e-6 in the logits changes about one draw in a million. Each row is
computed alone, in an order of its own, so its token does not depend on the rest of the batch.

See ADR 12 and ADR 85.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.batch import Draw, Fault
from services.engine.sampling.philox import uniforms
from services.protocol.ticket import SamplingParams

_LOGITS_AT_ONCE = 600_000  # keeps the temporaries in the cache: 2.4 MB
_CHUNK = 64  # tokens that race as one in the first round
_NUCLEUS_WIDTH = 1024  # top_p without top_k ranks so many tokens, and all only if it needs more
SMALLEST_TEMPERATURE = 1e-30  # a smaller fp32 temperature may round to 0


def sample(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[int | Fault]:
    """Returns one token id per row, or the fault of that row.

    logits: fp32 [N, vocab_size]; row i is for `draws[i]`, whose token will be at `positions[i]`.
    Temperature 0 takes the largest logit, and the lowest id of equal ones. Rows are checked for
    finite logits before any adjustment, since a mask would hide a broken row.
    """
    tokens = greedy_tokens(*logits.max(dim=-1))
    logits = _adjusted(logits, draws, tokens)
    drawn = [
        row
        for row, draw in enumerate(draws)
        if draw.sampling.temperature > 0 and not isinstance(tokens[row], Fault)
    ]
    num_rows = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for begin in range(0, len(drawn), num_rows):
        rows = drawn[begin : begin + num_rows]
        probs = filtered_probs(logits[rows], [draws[row].sampling for row in rows])
        for row, token in zip(rows, _winners(probs, rows, draws, positions), strict=True):
            tokens[row] = token
    return tokens


def _adjusted(logits: Tensor, draws: Sequence[Draw], tokens: list[int | Fault]) -> Tensor:
    """The adjusted logits, copied if they differ. Writes each adjusted row's argmax to `tokens`."""
    changing = [
        (row, draw.adjustment)
        for row, draw in enumerate(draws)
        if draw.adjustment is not None and not isinstance(tokens[row], Fault)
    ]
    if not changing:
        return logits
    logits = logits.clone()
    for row, adjustment in changing:
        logits[row] = adjustment.applied(logits[row])
    rows = [row for row, _ in changing]
    for row, token in zip(rows, greedy_tokens(*logits[rows].max(dim=-1)), strict=True):
        tokens[row] = token
    return logits


def filtered_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The probabilities that the filters leave, not normalized, 0 for all other tokens. fp32
    [N, vocab_size]. All temperatures are above 0."""
    columns = _Columns.of(params)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / columns.temperature
    thresholds = columns.min_p.log()  # the largest scaled logit is 0
    scaled.masked_fill_(scaled < thresholds, float("-inf"))
    probs = scaled.softmax(dim=-1)
    vocab_size = logits.shape[1]
    ranked = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if ranked:
        thresholds[ranked] = _ranked_thresholds(scaled[ranked], probs[ranked], columns[ranked])
    return probs.masked_fill_(scaled < thresholds, 0.0)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The sampling parameters of N rows, [N, 1] each."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "_Columns":
        return cls(
            temperature=torch.tensor([[max(p.temperature, SMALLEST_TEMPERATURE)] for p in params]),
            min_p=torch.tensor([[p.min_p] for p in params], dtype=torch.float32),
            top_k=torch.tensor([[p.top_k] for p in params]),
            top_p=torch.tensor([[p.top_p] for p in params], dtype=torch.float64),
        )

    def __getitem__(self, rows: Sequence[int] | Tensor) -> "_Columns":
        return _Columns(
            self.temperature[rows], self.min_p[rows], self.top_k[rows], self.top_p[rows]
        )


def _ranked_thresholds(scaled: Tensor, probs: Tensor, columns: _Columns) -> Tensor:
    """The smallest scaled logit that top_k and top_p keep, [N, 1].

    Each row sorts only its likeliest tokens: as many as the largest top_k, and at least
    _NUCLEUS_WIDTH if a row has top_p alone. Rows whose top_p reaches further are computed again
    over the whole vocabulary. A row's ranks, probabilities and sums are the same at any width, so
    the result does not depend on other rows.
    """
    vocab_size = scaled.shape[1]
    nucleus_width = _NUCLEUS_WIDTH if bool((columns.top_k == 0).any()) else 1
    width = min(vocab_size, max(nucleus_width, int(columns.top_k.max())))
    thresholds, open_rows = _thresholds_within(width, scaled, probs, columns)
    if width < vocab_size and len(open_rows):
        thresholds[open_rows], _ = _thresholds_within(
            vocab_size, scaled[open_rows], probs[open_rows], columns[open_rows]
        )
    return thresholds


def _thresholds_within(
    width: int, scaled: Tensor, probs: Tensor, columns: _Columns
) -> tuple[Tensor, Tensor]:
    """The thresholds among the `width` likeliest tokens, and the rows that need more tokens."""
    values, token_ids = scaled.topk(width)
    likeliest = probs.gather(1, token_ids).double()
    cumulative = likeliest.cumsum(dim=1)
    limit = torch.where(columns.top_k > 0, columns.top_k, scaled.shape[1])
    last_rank = (limit - 1).clamp(max=width - 1)
    # top_p is a share of the probability that top_k leaves.
    whole = torch.where(columns.top_k > 0, cumulative.gather(1, last_rank), 1.0)
    before = cumulative - likeliest
    kept = (before < columns.top_p * whole) & (torch.arange(width) <= last_rank)
    num_kept = kept.sum(dim=1, keepdim=True)  # at least 1: nothing is before the first
    is_open = (num_kept == width) & (columns.top_k == 0)
    return values.gather(1, num_kept - 1), is_open.squeeze(1).nonzero().squeeze(1)


def _winners(
    probs: Tensor, rows: Sequence[int], draws: Sequence[Draw], positions: Sequence[int]
) -> list[int]:
    """The token that each row draws. The first _CHUNK random numbers are for the tokens of the
    winning chunk, the others for the chunks. A probability of 0 never finishes."""
    vocab_size = probs.shape[1]
    num_chunks = -(-vocab_size // _CHUNK)
    padded = F.pad(probs, (0, num_chunks * _CHUNK - vocab_size))
    chunks = padded.view(len(rows), num_chunks, _CHUNK)
    times = _exponentials(_CHUNK + num_chunks, rows, draws, positions)
    won = (times[:, _CHUNK:] / chunks.double().sum(dim=-1)).argmin(dim=-1)
    within = (times[:, :_CHUNK] / chunks[torch.arange(len(rows)), won]).argmin(dim=-1)
    found: list[int] = (won * _CHUNK + within).tolist()
    return found


def _exponentials(
    count: int, rows: Sequence[int], draws: Sequence[Draw], positions: Sequence[int]
) -> Tensor:
    """The exponential numbers E, fp64 [len(rows), count]."""
    numbers = torch.stack(
        [
            uniforms(draws[row].sampling.seed, draws[row].sequence_index, positions[row], count)
            for row in rows
        ]
    )
    return numbers.double().neg_().log1p_().neg_()


def greedy_tokens(largest: Tensor, token_ids: Tensor) -> list[int | Fault]:
    """The argmax of each row, or its fault. `largest`: each row's largest logit, [N]; `token_ids`:
    its token. A NaN or +inf anywhere in a row is its largest logit; a -inf does no harm."""
    return [
        token if finite else Fault.NOT_FINITE
        for token, finite in zip(token_ids.tolist(), largest.isfinite().tolist(), strict=True)
    ]
