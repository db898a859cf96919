"""The runner: one forward pass over the rows of a step, and the tokens drawn after them."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kvops import Backend, int8_kv
from services.engine.batch import Draw, Row, Wait
from services.engine.device.greedy_flight import CopyFlight, GreedyFlight
from services.engine.device.inputs import Indices, StepInputs
from services.engine.device.threads import use_device
from services.engine.forward import CompleteFlight, Flight
from services.engine.models import Batch, Model
from services.engine.sampling.logit_queries import queries, row_results, wanted_states
from services.protocol.ticket import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)


class Runner:
    """Runs a model on an arena `[num_blocks, num_layers, 2, block_size, kv_heads, head_dim]`, which
    is of the model's dtype or in int8 (`kvops.int8_kv`).

    Model and arena are on one device, of any kind; only tokens and logprobs come to the host.
    Between steps the runner keeps the KV in the arena and the tokens of the last step, which rows
    of the next one may take. Raises ValueError if shape, dtype or device of the arena are not the
    model's.

    `computes_at_launch`: whether every flight is complete at its launch, as on a CPU. Else a step
    is in flight if all its draws are argmaxes; other draws need logits on the host, for which
    `launch` waits.
    """

    def __init__(self, model: Model, kv: Tensor, block_size: int, ops: Backend) -> None:
        config = model.config
        in_int8 = kv.dtype == torch.int8
        width = config.head_dim + (int8_kv.SCALE_BYTES if in_int8 else 0)
        wanted = (config.num_layers, 2, block_size, config.num_kv_heads, width)
        if (
            kv.dim() != 6
            or tuple(kv.shape[1:]) != wanted
            or not (in_int8 or kv.dtype == model.dtype)
        ):
            raise ValueError(f"arena {kv.dtype} {list(kv.shape)} is not {model.dtype} {wanted}")
        if kv.device != model.device:
            raise ValueError(f"the arena is on {kv.device}, the model on {model.device}")
        self.computes_at_launch = kv.device.type == "cpu"
        self._last: GreedyFlight | None = None
        self._inputs = StepInputs(kv.device)
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._ops = ops

    @torch.inference_mode()
    def launch(
        self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = (), num_waiting: int = 0
    ) -> Flight:
        """Copy blocks, compute all rows in one pass, store their KV, and draw the tokens that each
        row asks for.

        Each row gets its tokens, as a `RowOutput` if it asks for logprobs. A row whose logits are
        not finite gets a `Fault` instead; the other rows are not affected. `num_waiting` is unused.

        ValueError, before any KV is written: a row has no tokens, a negative start, more positions
        than the context or its block table, an id out of range, or takes a token that the last step
        did not leave on the device.
        """
        use_device(self._kv.device)
        if copies:
            self.copy_blocks(copies)
            if not rows:
                return CopyFlight(self._kv.device)
        hidden = self.hidden(rows)
        asked = queries(rows)
        if self.computes_at_launch or not all(query.is_plain for query in asked):
            self._last = None
            answers = self._model.answer(hidden, asked) if asked else ()
            return CompleteFlight(row_results(rows, answers))
        self._last = GreedyFlight.of(rows, asked, self._model.logits(hidden))
        return self._last

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, target) each; all sources are read before any target is written."""
        places = torch.tensor(pairs, dtype=torch.int64, device=self._kv.device).view(-1, 2)
        self._ops.copy_blocks(self._kv, places)

    def yield_device(self, wait: Wait) -> None:
        """Do nothing: the operating system divides the CPUs."""

    def on_idle(self) -> None:
        """Do nothing: the runner occupies no device between steps."""

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows and store their KV, without the head. Returns the final states that the
        rows need, [num_states, hidden_size], row after row: one for each token of its `scoring`,
        then the one after its last token if it draws (`wanted_states`)."""
        ends = np.cumsum([len(row.token_ids) for row in rows])
        if all(row.scoring is None for row in rows):
            wanted = ends[[bool(row.draws) for row in rows]] - 1
        else:
            wanted = np.array(wanted_states(rows), dtype=np.int64)
        batch, placed = self._batch(rows, wanted)
        return self._model.forward(batch, self._kv, placed)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows and return the logits of their states, fp32 [num_states, vocab_size]."""
        return self._model.logits(self.hidden(rows))

    def warm_up(self, max_tokens: int) -> None:
        """Touch every weight and the memory of a step: run one prefill of `max_tokens` tokens (at
        most the context) and one decode step. It stores no KV, and its results are dropped."""
        use_device(self._kv.device)
        num_tokens = min(max_tokens, self._model.config.max_position_embeddings)
        num_blocks = -(-num_tokens // self._block_size)
        for token_ids in ([0] * num_tokens, [0]):
            start = num_tokens - len(token_ids)
            row = Row(token_ids, start, [0] * num_blocks, num_tokens, (Draw(_GREEDY, 0),))
            self.logits([row])

    def run_largest_step(self, num_tokens: int, num_rows: int) -> None:
        """Run a step of `num_tokens` new tokens of `num_rows` rows that draw, for its memory. It
        stores no KV, and its results are dropped."""
        context = self._model.config.max_position_embeddings
        num_rows = min(num_rows, num_tokens)
        lens = [min(context, num_tokens // num_rows)] * num_rows
        lens[0] = min(context, num_tokens - sum(lens[1:]))
        draws = (Draw(_GREEDY, 0),)
        self.logits([Row([0] * n, 0, [0] * -(-n // self._block_size), n, draws) for n in lens])

    def _batch(self, rows: Sequence[Row], wanted: Indices) -> tuple[Batch, Tensor]:
        """The batch of the rows, and `wanted`, on the device."""
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
        arrays = {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slots,
            "block_tables": tables,
            "cu_query_lens": np.concatenate([[0], ends]).astype(np.int32),
            "context_lens": (starts + lens).astype(np.int32),
            "wanted": wanted,
        }
        if any(row.drawn_by is not None for row in rows):
            arrays |= self._sources(rows, ends)
        placed = self._inputs.place(arrays)
        if self._last is not None and "taken" in placed:
            drawn = self._last.drawn[placed.pop("sources")].clamp(min=0)  # after a fault: any token
            placed["token_ids"].index_copy_(0, placed.pop("taken"), drawn)
        wanted_there = placed.pop("wanted")
        longest = int(lens.max()), int((starts + lens).max())
        return Batch(**placed, max_query_len=longest[0], max_context_len=longest[1]), wanted_there

    def _sources(self, rows: Sequence[Row], ends: Indices) -> dict[str, Indices]:
        """`taken`: the tokens of the step that the host does not know, as indices. `sources`: where
        the last step has them."""
        if self._last is None:
            raise ValueError("a row takes a token of the last step, which is not on the device")
        taken = [(end - 1, row.drawn_by) for row, end in zip(rows, ends, strict=True)]
        known = [(place, by) for place, by in taken if by is not None]
        return {
            "taken": np.array([place for place, _ in known], dtype=np.int64),
            "sources": np.array(self._last.inputs([by for _, by in known]), dtype=np.int64),
        }

    def _block_tables(self, rows: Sequence[Row]) -> Indices:
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
