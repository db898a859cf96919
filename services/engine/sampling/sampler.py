"""The next token of each row: the most likely one, or one drawn from what the filters leave, after
what `services.engine.sampling.adjustment` makes of its logits.

The filters come in vLLM's order: temperature, min_p, top_k, top_p, each on what the one before has
left. All three come down to a threshold on the scaled logits, so that tokens that tie at the
threshold stay together and nothing depends on how a sort breaks ties.

A draw is an exponential race in two rounds. Chunks of 64 tokens race first: chunk c finishes at
E_c / P_c, where E_c is exponential and P_c the sum of its tokens' probabilities, and the first one
wins, with probability P_c / sum(P). Then its tokens do: token i finishes at E_i / p_i.
So a token wins with probability p_i / sum(p), for a random number per chunk instead of one per
token. Unlike a walk along the cumulative distribution, a last-bit change of some probability moves
nobody else's share of the random numbers, so that noise of 1e-6 in the logits turns about one draw
in a million. Every row is computed by itself, in an order of its own: a row's token does not depend
on the rest of the batch.

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
_CHUNK = 64  # tokens that race as one first
_NUCLEUS_WIDTH = 1024  # how many of the likeliest tokens top_p alone looks at before it sorts all
SMALLEST_TEMPERATURE = 1e-30  # an fp32 temperature below may round to 0


def sample(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[int | Fault]:
    """One token id per row, or what is wrong with that row.

    logits: [N, vocab_size] fp32, row i for `draws[i]`, whose token will stand at `positions[i]`.
    Temperature 0 takes the largest logit, of equal ones the lowest id. They are finite, or not,
    before anything adjusts them.
    """
    tokens = greedy(*logits.max(dim=-1))
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
    """The logits to draw from, in memory of their own where they change; and the largest of those
    that do, into `tokens`."""
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
    for row, token in zip(rows, greedy(*logits[rows].max(dim=-1)), strict=True):
        tokens[row] = token
    return logits


def filtered_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities up to a factor per row, 0 for what the filters take out. [N, vocab_size] fp32;
    every temperature > 0."""
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
    """The parameters of N rows, [N, 1] each."""

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

    Only as many tokens are sorted as top_k keeps, or _NUCLEUS_WIDTH for top_p alone; rows whose
    top_p reaches further are done again over the whole vocabulary. Ranks, probabilities and sums of
    a row are the same at any width, so neither width nor company shows in the result.
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
    """Thresholds as far as the `width` likeliest tokens tell, and the rows where they do not."""
    values, token_ids = scaled.topk(width)
    likeliest = probs.gather(1, token_ids).double()
    cumulative = likeliest.cumsum(dim=1)
    limit = torch.where(columns.top_k > 0, columns.top_k, scaled.shape[1])
    last_rank = (limit - 1).clamp(max=width - 1)
    # top_p is a share of what top_k has left.
    whole = torch.where(columns.top_k > 0, cumulative.gather(1, last_rank), 1.0)
    before = cumulative - likeliest
    kept = (before < columns.top_p * whole) & (torch.arange(width) <= last_rank)
    num_kept = kept.sum(dim=1, keepdim=True)  # at least 1: nothing is before the first
    is_open = (num_kept == width) & (columns.top_k == 0)
    return values.gather(1, num_kept - 1), is_open.squeeze(1).nonzero().squeeze(1)


def _winners(
    probs: Tensor, rows: Sequence[int], draws: Sequence[Draw], positions: Sequence[int]
) -> list[int]:
    """A token each. The first _CHUNK random numbers are those of the tokens in the chunk that wins,
    the next ones those of the chunks; a probability of 0 never finishes."""
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
    """E, fp64 [len(rows), count]."""
    numbers = torch.stack(
        [
            uniforms(draws[row].sampling.seed, draws[row].sequence_index, positions[row], count)
            for row in rows
        ]
    )
    return numbers.double().neg_().log1p_().neg_()


def greedy(largest: Tensor, token_ids: Tensor) -> list[int | Fault]:
    """`token_ids`: of each row's largest logit, [N]. A NaN or an infinity anywhere in a row is its
    largest; -inf alone is not harmful."""
    return [
        token if finite else Fault.NOT_FINITE
        for token, finite in zip(token_ids.tolist(), largest.isfinite().tolist(), strict=True)
    ]
