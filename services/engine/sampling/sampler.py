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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.batch import Draw, Fault
from services.engine.sampling.arithmetic import exponentials, log, weights
from services.engine.sampling.philox import uniforms
from services.protocol.ticket import SamplingParams

_LOGITS_AT_ONCE = 600_000  # keeps the temporaries in the cache: 2.4 MB
_CHUNK = 64  # tokens that race as one in the first round
_NUCLEUS_WIDTH = 1024  # top_p ranks so many tokens, and all only if it needs more
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
        left = filtered_weights(logits[rows], [draws[row].sampling for row in rows])
        for row, token in zip(rows, _winners(left, rows, draws, positions), strict=True):
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


def filtered_weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights that the filters leave (`arithmetic.weights`), 0 for all other tokens. int64
    [N, vocab_size]. All temperatures are above 0."""
    columns = _Columns.of(params)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / columns.temperature
    scaled.masked_fill_(scaled < columns.least, float("-inf"))  # the largest is 0
    left = weights(scaled)
    vocab_size = logits.shape[1]
    for rows, keep in (
        ([i for i, p in enumerate(params) if 0 < p.top_k < vocab_size], _keep_top_k),
        ([i for i, p in enumerate(params) if p.top_p < 1], _keep_top_p),
    ):
        if rows:
            left[rows] = keep(scaled[rows], left[rows], columns[rows])
    return left


@lru_cache
def least_scaled(min_p: float) -> float:
    """The least scaled logit that min_p leaves; the largest is 0."""
    return float(log(torch.tensor([min_p])))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The sampling parameters of N rows, [N, 1] each. `least`: see `least_scaled`."""

    temperature: Tensor
    least: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "_Columns":
        return cls(
            temperature=torch.tensor([[max(p.temperature, SMALLEST_TEMPERATURE)] for p in params]),
            least=torch.tensor([[least_scaled(p.min_p)] for p in params]),
            top_k=torch.tensor([[p.top_k] for p in params]),
            top_p=torch.tensor([[p.top_p] for p in params], dtype=torch.float64),
        )

    def __getitem__(self, rows: Sequence[int] | Tensor) -> "_Columns":
        return _Columns(
            self.temperature[rows], self.least[rows], self.top_k[rows], self.top_p[rows]
        )


def _keep_top_k(scaled: Tensor, left: Tensor, columns: _Columns) -> Tensor:
    likeliest = scaled.topk(int(columns.top_k.max())).values
    return left.masked_fill_(scaled < likeliest.gather(1, columns.top_k - 1), 0)


def _keep_top_p(scaled: Tensor, left: Tensor, columns: _Columns) -> Tensor:
    """The likeliest tokens, up to the first with which they have top_p of the weight that is left.

    Each row ranks only its likeliest tokens. Rows whose nucleus reaches further are computed again
    over the whole vocabulary, with the same result for what the first ones ranked.
    """
    vocab_size = scaled.shape[1]
    wanted = (columns.top_p * left.sum(dim=1, keepdim=True).double()).ceil().long()
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


def _winners(
    left: Tensor, rows: Sequence[int], draws: Sequence[Draw], positions: Sequence[int]
) -> list[int]:
    """The token that each row draws. The first _CHUNK random numbers are for the tokens of the
    winning chunk, the others for the chunks. A weight of 0 never finishes; of equal times the
    first one wins."""
    vocab_size = left.shape[1]
    num_chunks = -(-vocab_size // _CHUNK)
    padded = F.pad(left, (0, num_chunks * _CHUNK - vocab_size))
    chunks = padded.view(len(rows), num_chunks, _CHUNK)
    times = _exponentials(_CHUNK + num_chunks, rows, draws, positions)
    won = (times[:, _CHUNK:] / chunks.sum(dim=-1).float()).argmin(dim=-1)
    within = (times[:, :_CHUNK] / chunks[torch.arange(len(rows)), won].float()).argmin(dim=-1)
    found: list[int] = (won * _CHUNK + within).tolist()
    return found


def _exponentials(
    count: int, rows: Sequence[int], draws: Sequence[Draw], positions: Sequence[int]
) -> Tensor:
    """The exponential numbers E, fp32 [len(rows), count]."""
    numbers = torch.stack(
        [
            uniforms(draws[row].sampling.seed, draws[row].sequence_index, positions[row], count)
            for row in rows
        ]
    )
    return exponentials(numbers)


def greedy_tokens(largest: Tensor, token_ids: Tensor) -> list[int | Fault]:
    """The argmax of each row, or its fault. `largest`: each row's largest logit, [N]; `token_ids`:
    its token. A NaN or +inf anywhere in a row is its largest logit; a -inf does no harm."""
    return [
        token if finite else Fault.NOT_FINITE
        for token, finite in zip(token_ids.tolist(), largest.isfinite().tolist(), strict=True)
    ]
