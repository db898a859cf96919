"""Counts on the device how many drafts a step accepts, and moves the rows behind it, so that the
next step is launched before the host knows the number.

    step 1           | t  | d1 | d2 | d3 |      draws g0 g1 g2 g3; g0 is d1, and g1 is not d2
    step 2, at least      | g? | e1 | e2 |      the positions if no draft is accepted
    step 2                     | g1 | e1 | e2 | one draft is accepted: positions, slots, contexts
                                                and draws are one later

The drafts of step 2 are those that a draft model has drawn behind g1: its rows are moved, too.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import Row
from services.engine.device.inputs import Indices
from services.engine.device.token_table import TokenTable
from services.engine.sampling.sampling_batch import SamplingBatch


def draft_places(batch: SamplingBatch, ends: Indices, table: TokenTable) -> dict[str, Indices]:
    """The arrays that `num_accepted` needs, and those with which the table writes its result. There
    are none if no row has drafts. `ends` are the ends of the rows in the tokens of the step."""
    if not any(row.num_drafts for row in batch.rows):
        return {}
    lens = np.array([row.num_drafts for row in batch.rows], np.int64)
    numbers, ends = np.arange(lens.max() + 1), ends.astype(np.int64)
    first_draws = batch.first_draws(range(len(lens)))[:, None]
    draws = first_draws + np.minimum(numbers, lens[:, None])
    return {
        "num_drafts": lens,
        "drafts": np.minimum((ends - lens)[:, None] + numbers[:-1], ends[:, None] - 1),
        "draws_of_drafts": np.minimum(draws, len(batch.draws) - 1),
        **table.row_places(batch.rows, ends),
    }


def num_accepted(placed: Mapping[str, Tensor], drawn: Tensor) -> Tensor:
    """How many drafts of each row are the tokens that the step has drawn in their places. A row
    whose next draw is from logits that are not finite draws it again: its last draft is no draft
    of this step then."""
    lens, drafts = placed["num_drafts"], placed["token_ids"][placed["drafts"]]
    draws = drawn[placed["draws_of_drafts"]]
    is_draft = torch.arange(drafts.shape[1], device=drawn.device) < lens[:, None]
    number = (is_draft & (drafts == draws[:, :-1])).long().cumprod(dim=1).sum(dim=1)
    next_draw = draws.gather(1, number[:, None]).squeeze(1)
    return torch.where(next_draw < 0, (number - 1).clamp(min=0), number)


def moved_rows(
    rows: Sequence[Row], batch: SamplingBatch, ends: Indices, row_ends: Indices, table: TokenTable
) -> dict[str, Indices]:
    """The arrays that `move` needs; none if no row is behind drafts. `ends` are the ends of `rows`
    in the tokens of the step. `row_ends` are the ends of the rows as the step computes them, where
    a row for each token may have taken the place of a longer row. A moved token is the only token
    of its row there."""
    moved = [number for number, row in enumerate(rows) if row.num_unknown]
    if not moved:
        return {}
    by = [table.entry_of(rows[number]) for number in moved]
    lens = [rows[number].num_tokens for number in moved]
    num_draws = [len(rows[number].draws) for number in moved]
    draws, tokens = batch.first_draws(moved), _ranges(ends[moved] - lens, lens)
    return {
        "moved": tokens,
        "rows_moved": np.searchsorted(row_ends, tokens, side="right"),
        "moved_by": np.repeat(np.array(by, np.int64), lens),
        "moved_draws": _ranges(draws, num_draws),
        "draws_moved_by": np.repeat(np.array(by, np.int64), num_draws),
    }


def move(placed: Mapping[str, Tensor], table: TokenTable, block_size: int) -> None:
    """Writes `placed`: moves tokens and draws by the numbers of accepted drafts."""
    if "moved" not in placed:
        return
    tokens, rows = placed["moved"], placed["rows_moved"]
    by = table.num_accepted(placed["moved_by"])
    placed["context_lens"].index_add_(0, rows, by.int())
    positions = placed["positions"].index_add_(0, tokens, by)[tokens]
    blocks = placed["block_tables"][rows, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    placed["slot_mapping"].index_copy_(0, tokens, slots)
    moved_draws = table.num_accepted(placed["draws_moved_by"])
    placed["draws.position"].index_add_(0, placed["moved_draws"], moved_draws)


def _ranges(begins: Indices, lens: Sequence[int]) -> Indices:
    """Joins a range for each begin, which has as many numbers as `lens` says."""
    ends = np.cumsum(lens)
    return np.arange(sum(lens)) + np.repeat(begins - (ends - lens), lens)
