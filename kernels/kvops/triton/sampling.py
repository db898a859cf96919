"""Draws tokens from logits as `services.engine.sampling.sampler` does, with random numbers of its
own. Sums are of whole numbers, in any order. All kernels compute the same scaled logits, so the
compiler may fuse no operations (`enable_fp_fusion`).

    look       the largest logit of each part of a row; penalties and biases applied before
    search     one step of a search for the least scaled logit that top_k leaves, then top_p: four
               bits of it, by the number or weight of the tokens at or above 16 candidates
    race       the chunk of 64 tokens of each part that finishes first
    finish     the chunk that finishes first of all, and its token that does; or the likeliest token

Programs are (row, part): a part is 4,096 tokens. A scaled logit is at most 0; its *key* is a whole
number that grows with it.
"""

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from kvops.draws import DRAW_DTYPES, DrawTensors, PenaltyTables
from kvops.triton import sampling_kernels as kernels

_BITS = 4
_TOP_SHIFT = 28
_NUM_STEPS = _TOP_SHIFT // _BITS + 2


def sample(logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
    """See `kvops.ops.Backend.sample`."""
    num_draws, vocab_size = len(draws.state), logits.shape[1]
    num_parts = triton.cdiv(vocab_size, kernels.PART.value)
    device = logits.device
    spots = torch.empty((2, num_draws, num_parts), dtype=torch.int32, device=device)
    tokens = torch.empty(num_draws, dtype=torch.int64, device=device)
    rows = kernels.Logits(
        *(logits, logits.stride(0), vocab_size, num_parts, draws.state, draws.slot),
        adjusted=torch.empty((num_draws if tables else 0, vocab_size), device=device),
        flags=tables.flags if tables else spots,
        maxima=torch.empty((3, num_draws, num_parts), device=device),
    )
    filters = kernels.Filters(
        *(draws.temperature, draws.least, draws.top_k, draws.top_p),
        least_keys=torch.zeros((2, num_draws), dtype=torch.int32, device=device),
    )
    numbers = kernels.Numbers(draws.seed, draws.sequence_index, draws.position)
    winners = kernels.Winners(
        times=torch.empty((num_draws, num_parts), device=device),
        chunks=torch.empty((num_draws, num_parts), dtype=torch.int32, device=device),
    )
    exact = {"ADJUSTED": tables is not None, "enable_fp_fusion": False}
    shape = {"PARTS": triton.next_power_of_2(num_parts), **exact}
    grid = (num_draws, num_parts)
    kernels.look[grid](
        *(rows, num_draws, spots, draws.repetition, draws.frequency, draws.presence),
        tables.biases if tables else logits,
        tables.counts if tables else spots,
        **exact,
    )
    for by_weight, is_needed in ((False, draws.has_top_k), (True, draws.has_top_p)):
        if is_needed:
            _search(rows, filters, num_draws, {"BY_WEIGHT": by_weight, **shape})
    kernels.race[grid](rows, filters, numbers, winners, num_draws, **shape)
    kernels.finish[(num_draws,)](rows, filters, numbers, winners, num_draws, spots, tokens, **shape)
    return tokens


def _search(
    rows: kernels.Logits, filters: kernels.Filters, num_draws: int, constants: dict[str, int]
) -> None:
    """All steps of one search. Its result is in `filters.least_keys`."""
    device, dtype = rows.raw.device, torch.int64 if constants["BY_WEIGHT"] else torch.int32
    shape = (2, num_draws, rows.num_parts, kernels.COUNTS.value)
    parts = torch.empty(shape, dtype=dtype, device=device)
    found = torch.empty((_NUM_STEPS, num_draws), dtype=torch.int32, device=device)
    wholes = torch.empty(num_draws, dtype=torch.int64, device=device)
    for step in range(_NUM_STEPS):
        shift = _TOP_SHIFT - step * _BITS
        grid = (num_draws, rows.num_parts if shift >= 0 else 1)
        kernels.search[grid](
            rows, filters, num_draws, parts, found, wholes, step, shift, **constants
        )


def warm_up(vocab_size: int, device: str) -> None:
    """Compile the kernels for all kinds of draws; they do not depend on the number of draws."""
    zeros = {
        name: torch.zeros(2, dtype=dtype, device=device) for name, dtype in DRAW_DTYPES.items()
    }
    draws = DrawTensors(**zeros, has_top_k=True, has_top_p=True)
    logits = torch.zeros((2, vocab_size), device=device)
    tables = PenaltyTables(
        torch.zeros_like(logits),
        torch.zeros_like(logits, dtype=torch.int32),
        torch.zeros_like(logits, dtype=torch.int8),
    )
    for some in (None, tables):
        sample(logits, draws, some)
