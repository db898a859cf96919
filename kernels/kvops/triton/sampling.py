"""Draws tokens from logits as `services.engine.sampling.sampler` does, with random numbers of its
own. Sums are of whole numbers, in any order. All kernels compute the same scaled logits, so the
compiler may fuse no operations (`enable_fp_fusion`).

    look       the largest logit of each part of a row; penalties and biases applied before
    survey     how many tokens of each part are close to the row's largest logit, and their weight
    choose     gathers the closest tokens, among which the last one that the filters leave must be,
               and finds the least scaled logit that top_k leaves, then top_p
    race       the chunk of 64 tokens of each part that finishes first; then the first of these
               chunks, and its token that finishes first; or the likeliest token

A batch without top_k and top_p takes two launches, look and race. Where a kernel needs the results
of all parts of a row, the program of the part that comes last goes on with them.

Programs are (row, part): a part is 4,096 tokens. A scaled logit is at most 0; its *key* is a whole
number that grows with it.
"""

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from kvops.draws import DRAW_DTYPES, DrawTensors, PenaltyTables
from kvops.triton import filter_kernels as filtering
from kvops.triton import sampling_kernels as kernels


def sample(logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
    """See `kvops.ops.Backend.sample`."""
    num_draws, vocab_size = len(draws.state), logits.shape[1]
    num_parts = triton.cdiv(vocab_size, kernels.PART.value)
    device = logits.device
    spots = torch.empty((2, num_draws, num_parts), dtype=torch.int32, device=device)
    tokens = torch.empty(num_draws, dtype=torch.int64, device=device)
    rows = kernels.Logits(
        logits,
        logits.stride(0),
        vocab_size,
        num_parts,
        draws.state,
        draws.slot,
        adjusted=torch.empty((num_draws if tables else 0, vocab_size), device=device),
        flags=tables.flags if tables else spots,
        maxima=torch.empty((3, num_draws, num_parts), device=device),
        progress=torch.empty((3, num_draws), dtype=torch.int32, device=device),
    )
    filters = kernels.Filters(draws.temperature, draws.least, draws.top_k, draws.top_p)
    numbers = kernels.Numbers(draws.seed, draws.sequence_index, draws.position)
    winners = kernels.Winners(
        times=torch.empty((num_draws, num_parts), device=device),
        chunks=torch.empty((num_draws, num_parts), dtype=torch.int32, device=device),
    )
    exact = {"ADJUSTED": tables is not None, "enable_fp_fusion": False}
    shape = {"PARTS": triton.next_power_of_2(num_parts), **exact}
    grid = (num_draws, num_parts)
    kernels.look[grid](
        rows,
        num_draws,
        spots,
        draws.repetition,
        draws.frequency,
        draws.presence,
        tables.biases if tables else logits,
        tables.counts if tables else spots,
        **exact,
    )
    if draws.has_top_k or draws.has_top_p:
        steps = (num_draws, num_parts, filtering.STEPS.value)
        near = filtering.Near(
            counts=torch.empty(steps, dtype=torch.int32, device=device),
            weights=torch.empty(steps, dtype=torch.int64, device=device),
            gathered=torch.empty((num_draws, vocab_size), device=device),
        )
        filtering.survey[grid](rows, filters, near, num_draws, **shape)
        filtering.choose[grid](rows, filters, near, num_draws, **shape)
    kernels.race[grid](rows, filters, numbers, winners, spots, tokens, num_draws, **shape)
    return tokens


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
