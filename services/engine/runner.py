"""The runner: one forward pass over the rows of a step, and the tokens drawn after them."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvops import Backend
from services.engine.batch import Draw, Row, RowResult, Wait
from services.engine.models import Batch, Model
from services.engine.sampling.logit_queries import queries, row_results, wanted_states
from services.protocol.ticket import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)


class Runner:
    """Runs a model on an arena `[num_blocks, num_layers, 2, block_size, kv_heads, head_dim]`.

    Model and arena are on one device, of any kind; only tokens and logprobs come to the host. The
    runner keeps no state between steps except the KV in the arena. Raises ValueError if shape or
    dtype of the arena are not the model's.
    """

    def __init__(self, model: Model, kv: Tensor, block_size: int, ops: Backend) -> None:
        config = model.config
        wanted = (config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        if kv.dim() != 6 or tuple(kv.shape[1:]) != wanted or kv.dtype != model.dtype:
            raise ValueError(f"arena {kv.dtype} {list(kv.shape)} is not {model.dtype} {wanted}")
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._ops = ops

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, target) each; all sources are read before any target is written."""
        self._ops.copy_blocks(self._kv, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], num_waiting: int = 0) -> list[RowResult]:
        """Compute all rows in one pass, store their KV, and draw the tokens that each row asks for.

        Each row gets its tokens, as a `RowOutput` if it asks for logprobs. A row whose logits are
        not finite gets a `Fault` instead; the other rows are not affected. `num_waiting` is unused.

        ValueError, before anything is written: no rows, or a row has no tokens, a negative start,
        more positions than the context or its block table, or an id out of range.
        """
        hidden = self.hidden(rows)
        asked = queries(rows)
        return row_results(rows, self._model.answer(hidden, asked) if asked else ())

    def yield_device(self, wait: Wait) -> None:
        """Do nothing: the operating system divides the CPUs."""

    def on_idle(self) -> None:
        """Do nothing: the runner occupies no device between steps."""

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows and store their KV, without the head. Returns the final states that the
        rows need, [num_states, hidden_size], row after row: one for each token of its `scoring`,
        then the one after its last token if it draws (`wanted_states`)."""
        batch = self._batch(rows)
        ends = np.cumsum([len(row.token_ids) for row in rows])
        if all(row.scoring is None for row in rows):
            wanted = ends[[bool(row.draws) for row in rows]] - 1
        else:
            wanted = np.array(wanted_states(rows), dtype=np.int64)
        return self._model.forward(batch, self._kv, self._to_device(wanted))

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows and return the logits of their states, fp32 [num_states, vocab_size]."""
        return self._model.logits(self.hidden(rows))

    def warm_up(self, max_tokens: int) -> None:
        """Touch every weight and the memory of a step: run one prefill of `max_tokens` tokens (at
        most the context) and one decode step. It stores no KV, and its results are dropped."""
        num_tokens = min(max_tokens, self._model.config.max_position_embeddings)
        num_blocks = -(-num_tokens // self._block_size)
        for token_ids in ([0] * num_tokens, [0]):
            start = num_tokens - len(token_ids)
            row = Row(token_ids, start, [0] * num_blocks, num_tokens, (Draw(_GREEDY, 0),))
            self.logits([row])

    def _batch(self, rows: Sequence[Row]) -> Batch:
        self._check(rows)
        lens = np.array([len(row.token_ids) for row in rows])
        starts = np.array([row.start for row in rows])
        tables = self._block_tables(rows)
        ends = lens.cumsum()
        row_of_token = np.repeat(np.arange(len(rows)), lens)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
        blocks = tables[row_of_token, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        slots[positions < np.array([row.store_from for row in rows])[row_of_token]] = -1
        token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._model.config.vocab_size:
            raise ValueError(f"token ids outside the vocabulary {self._model.config.vocab_size}")
        return Batch(
            token_ids=self._to_device(token_ids),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(tables),
            cu_query_lens=self._to_device(np.concatenate([[0], ends]).astype(np.int32)),
            context_lens=self._to_device((starts + lens).astype(np.int32)),
        )

    def _to_device(self, indices: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
        """The array as a tensor on the arena's device; on the CPU it is not copied."""
        return torch.from_numpy(indices).to(self._kv.device)

    def _block_tables(self, rows: Sequence[Row]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """[rows, longest]: each table up to the row's last position, padded with block 0."""
        needed = [-(-_end(row) // self._block_size) for row in rows]
        tables = np.zeros((len(rows), max(needed)), dtype=np.int32)
        for table, row, num_blocks in zip(tables, rows, needed, strict=True):
            table[:num_blocks] = row.block_table[:num_blocks]
        if tables.min() < 0 or tables.max() >= self._kv.shape[0]:
            raise ValueError(f"block ids outside the arena's {self._kv.shape[0]} blocks")
        return tables

    def _check(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise ValueError("a step without rows")
        for i, row in enumerate(rows):
            if not row.token_ids or row.start < 0:
                raise ValueError(f"row {i}: {len(row.token_ids)} tokens from {row.start} on")
            if _end(row) > self._model.config.max_position_embeddings:
                raise ValueError(
                    f"row {i}: ends at {_end(row)}, the model's context at "
                    f"{self._model.config.max_position_embeddings}"
                )
            if len(row.block_table) * self._block_size < _end(row):
                raise ValueError(
                    f"row {i}: {len(row.block_table)} blocks of {self._block_size} do not hold "
                    f"{_end(row)} positions"
                )


def _end(row: Row) -> int:
    """The row's context length, new tokens included: also the position of the token drawn next."""
    return row.start + len(row.token_ids)
