"""The runner: one forward pass over the rows of a step, and the tokens drawn after them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from kvops import Backend, int8_kv
from kvops.step import page_facts
from services.engine.batch import Draw, Row, Wait, with_draws_behind
from services.engine.device.acceptance import draft_places, move, moved_rows, num_accepted
from services.engine.device.drawing import DeviceDrawing
from services.engine.device.flights import DrawnFlight
from services.engine.device.graphs import Graph, padded
from services.engine.device.inputs import Indices, StepInputs, one_token_rows
from services.engine.device.largest_rows import largest_rows
from services.engine.device.steps import ModelSteps, StepFacts
from services.engine.device.threads import use_device
from services.engine.device.token_table import TokenTable
from services.engine.forward import Flight
from services.engine.models import Model
from services.engine.models.model import AdapterRun
from services.engine.sampling.masks import Masks, MaskThread
from services.engine.sampling.sampling_batch import SamplingBatch
from services.protocol.ticket import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


class Runner:
    """Runs a model on an arena `[num_blocks, num_layers, 2, block_size, kv_heads, head_dim]`, which
    is of the model's dtype, in int8 (`kvops.int8_kv`) or in fp8 (`kvops.fp8.saturated`).

    Model and arena are on one device, of any kind; only tokens and logprobs come to the host.
    Between steps the runner keeps the KV in the arena and, on a device, the last tokens of each
    sequence (`services.engine.device.token_table`). Raises ValueError if shape, dtype or device of
    the arena are not the model's.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        block_size: int,
        ops: Backend,
        steps: ModelSteps | None = None,
        table: TokenTable | None = None,
    ) -> None:
        """Without `steps`, the runner computes steps of the model alone. `table` is the target's,
        if the model is a draft model."""
        config = model.config
        in_int8 = kv.dtype == torch.int8
        width = config.head_dim + (int8_kv.SCALE_BYTES if in_int8 else 0)
        wanted = (config.num_layers, 2, block_size, config.num_kv_heads, width)
        if (
            kv.dim() != 6
            or tuple(kv.shape[1:]) != wanted
            or kv.dtype not in (model.dtype, *ops.kv_dtypes)
        ):
            raise ValueError(f"arena {kv.dtype} {list(kv.shape)} is not {model.dtype} {wanted}")
        if kv.device != model.device:
            raise ValueError(f"the arena is on {kv.device}, the model on {model.device}")
        self.computes_at_launch = not ops.has_sampler
        """Whether every flight is complete at its launch, and the model draws on the host, as on a
        CPU. Otherwise the backend draws on the device (`services.engine.device.drawing`)."""
        self.table = table or TokenTable(kv.device)
        self._last: DrawnFlight | None = None
        self._masks = MaskThread()
        self._drawing = DeviceDrawing(model, ops, kv.device)
        self._inputs = StepInputs(kv.device)
        self._steps = steps or ModelSteps(model, kv, block_size, ops)
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._ops = ops

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Flight:
        """Copy blocks, compute all rows in one pass, store their KV, and draw the tokens that each
        row asks for.

        Each row gets its tokens, as a `RowOutput` if it asks for logprobs. A row whose logits are
        not finite gets a `Fault` instead; the other rows are not affected.

        ValueError, before any KV is written: a row has no tokens, a negative start, more positions
        than the context or its block table, an id out of range, or takes a token that no step has
        drawn on the device.
        """
        use_device(self._kv.device)
        if copies:
            self._steps.copy_blocks(copies)
            if not rows:
                none = torch.empty(0, dtype=torch.int64, device=self._kv.device)
                return DrawnFlight(SamplingBatch.of(()), [(none,)], lambda: ())
        batch = SamplingBatch.of(rows)
        if any(row.draw_behind is not None for row in rows):
            return self._launch_behind(rows, batch)
        masks = self._masks.begin(batch.draws)
        hidden, placed = self._forward(rows, batch, self._others(batch))
        return self._flight(batch, hidden, placed, masks)

    def _launch_behind(self, rows: Sequence[Row], batch: SamplingBatch) -> Flight:
        """Launch the forward pass of rows whose draws depend on tokens of the last step. While the
        device computes it, wait for these tokens, and make and launch the draws."""
        last, (hidden, _) = self._last, self._forward(rows, batch, {})
        assert last is not None  # otherwise `_forward` raises
        batch = SamplingBatch.of(with_draws_behind(rows, last.batch.rows, last.result()))
        masks = self._masks.begin(batch.draws)
        placed = self._inputs.place(self._others(batch))
        return self._flight(batch, hidden, placed, masks)

    def _others(self, batch: SamplingBatch) -> dict[str, Indices]:
        """The inputs of a step that its draws and scores need."""
        given = {
            f"given.{number}": np.array(scoring.token_ids, np.int64)
            for number, _ in batch.apart
            if (scoring := batch.rows[number].scoring) is not None
        }
        if self.computes_at_launch or not batch.draws:
            return given
        return {**given, **self._drawing.arrays(batch), **self.table.draw_places(batch)}

    def _flight(
        self,
        batch: SamplingBatch,
        hidden: Tensor,
        placed: Mapping[str, Tensor],
        masks: Masks = lambda: (),
    ) -> Flight:
        """Draw and score. Waits for the masks once the forward pass is launched."""
        drawn: Sequence[Tensor] = (torch.empty(0, dtype=torch.int64, device=self._kv.device),)
        if batch.draws and self.computes_at_launch:
            drawn = self._model.draw(batch.states_of(hidden), batch, masks())
        elif batch.draws:
            drawn = self._drawing.draw(hidden, batch, placed, masks())
            self.table.write(placed, placed["draws.position"], drawn[0])
        outputs: list[Sequence[Tensor]] = [drawn]
        for number, places in batch.apart:
            scoring, states = batch.rows[number].scoring, hidden[places]
            if scoring is None:
                outputs.append((self._to_pool(states),))
            else:
                given = placed[f"given.{number}"]
                outputs.append(self._model.score(states, given, scoring.num_top))
        if "num_drafts" in placed:
            self.table.write_accepted(placed, num_accepted(placed, drawn[0]))
        flight = DrawnFlight(batch, outputs, masks)
        if not self.computes_at_launch:
            self._last = flight
        return flight

    def _to_pool(self, states: Tensor) -> Tensor:
        """Return the states of a row for its pooler. On a CPU these are all of them, so that chunks
        change no bit. A device, which rounds by the batch anyway, adds them up itself: the copy of
        all states to the host would hold up every row of the step."""
        if self.computes_at_launch:
            return states.float()
        return states.sum(dim=0, keepdim=True, dtype=torch.float64)

    def yield_device(self, wait: Wait) -> None:
        """Do nothing: the operating system divides the CPUs."""

    def on_idle(self) -> None:
        """Do nothing: the runner occupies no device between steps."""

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows and store their KV, without the head. Returns the final states that the
        rows need, [num_states, hidden_size], row after row (`SamplingBatch.wanted`)."""
        return self._forward(rows, SamplingBatch.of(rows), {})[0]

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows and return the logits of their states, fp32 [num_states, vocab_size]."""
        return self._model.logits(self.hidden(rows))

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        """Touch every weight and the memory of a step: run prefills of `max_tokens` and of other
        numbers of tokens (at most the context) and one decode step, and compile what steps of up to
        `max_rows` rows need. It stores no KV, and its results are dropped."""
        use_device(self._kv.device)
        self._steps.warm_up(max_rows)
        context = self._model.config.max_position_embeddings
        numbers = {min(number, context) for number in (max_tokens, *self._ops.linear_rows)}
        end = max(numbers)
        num_blocks = -(-end // self._block_size)
        for number in sorted(numbers, reverse=True):
            row = Row([0] * number, end - number, [0] * num_blocks, end, (Draw(_GREEDY, 0),))
            self.logits([row])
        self._ops.warm_up_sampler(self._model.config.vocab_size)

    def run_largest_step(self, num_tokens: int, num_rows: int) -> None:
        """Run a step of `num_tokens` new tokens of `num_rows` rows with the draws that take the
        most memory. It stores no KV, and its results are dropped."""
        config = self._model.config
        num_rows, context = min(num_rows, num_tokens), config.max_position_embeddings
        lens = [min(context, num_tokens // num_rows)] * num_rows
        lens[0] = min(context, num_tokens - sum(lens[1:]))
        self.launch(largest_rows(lens, self._block_size, config.vocab_size)).result()

    def capture_graphs(
        self,
        max_rows: int,
        max_tokens: int,
        new_graph: Callable[[], Graph] | None = None,
        max_lora_rank: int = 0,
    ) -> None:
        """Record graphs for decode steps of up to `max_rows` rows and for other steps of up to
        `max_tokens` tokens, which later steps replay; see `ModelSteps.capture`."""
        self._steps.capture(max_rows, max_tokens, new_graph, max_lora_rank)

    def _forward(
        self, rows: Sequence[Row], batch: SamplingBatch, others: Mapping[str, Indices]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the rows, from a graph if there is one for the step. On a device, a step with
        short rows becomes a decode step. Returns the states that the rows need, and the other
        arrays on the device."""
        arrays, wanted = self._arrays(rows), np.array(batch.wanted, np.int64)
        ends, num_tokens = arrays["cu_query_lens"][1:], len(arrays["token_ids"])
        if not self.computes_at_launch and len(rows) < num_tokens and all(map(_is_short, rows)):
            arrays = one_token_rows(arrays)
        num_rows, row_ends = len(arrays["context_lens"]), arrays["cu_query_lens"][1:]
        adapters = _adapter_runs(rows)
        graph = self._steps.graph_for(num_tokens, num_rows, bool(adapters))
        if graph is not None:
            arrays = padded(arrays, graph)
        if not self.computes_at_launch:
            arrays |= draft_places(batch, ends, self.table)
            arrays |= moved_rows(rows, batch, ends, row_ends, self.table)
            arrays |= self.table.read_places(rows, ends)
        placed = self._placed({**arrays, "wanted": wanted, **others})
        facts = StepFacts(
            arrays["cu_query_lens"],
            arrays["context_lens"],
            num_tokens,
            graph,
            adapters=adapters,
        )
        return self._steps.compute(placed, facts), placed

    def _placed(self, arrays: dict[str, Indices]) -> dict[str, Tensor]:
        """The arrays on the device, with what only the device knows: the places of rows behind
        drafts, and tokens."""
        if self._ops.needs_plan:
            if "moved" in arrays:
                raise ValueError("the host plans attention, and does not know the rows' contexts")
            arrays["page_ids"] = self._page_ids(arrays)
        placed = self._inputs.place(arrays)
        move(placed, self.table, self._block_size)
        self.table.read(placed)
        return placed

    def _arrays(self, rows: Sequence[Row]) -> dict[str, Indices]:
        """The tensors of the rows' `Batch`."""
        self._check(rows)
        lens = np.array([row.num_tokens for row in rows])
        starts = np.array([row.start for row in rows])
        tables = self._block_tables(rows)
        ends = lens.cumsum()
        row_of_token = np.repeat(np.arange(len(rows)), lens)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
        blocks = tables[row_of_token, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        slots[positions < np.array([row.store_from for row in rows])[row_of_token]] = -1
        token_ids = np.fromiter(chain.from_iterable(map(_tokens, rows)), np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._model.config.vocab_size:
            raise ValueError(f"token ids outside the vocabulary {self._model.config.vocab_size}")
        return {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slots,
            "block_tables": tables,
            "cu_query_lens": np.concatenate([[0], ends]).astype(np.int32),
            "context_lens": (starts + lens).astype(np.int32),
        }

    def _page_ids(self, arrays: Mapping[str, Indices]) -> Indices:
        """The blocks of the rows, one row after the other."""
        num_pages, _ = page_facts(arrays["context_lens"], self._block_size)
        tables = arrays["block_tables"]
        return tables[np.arange(tables.shape[1]) < num_pages[:, None]]

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
            if not row.num_tokens or row.start < 0:
                raise ValueError(f"row {i}: {row.num_tokens} tokens from {row.start} on")
            end = _end(row)
            if end > self._model.config.max_position_embeddings:
                raise ValueError(
                    f"row {i}: ends at {end}, the model's context at "
                    f"{self._model.config.max_position_embeddings}"
                )
            if len(row.block_table) * self._block_size < end:
                raise ValueError(
                    f"row {i}: {len(row.block_table)} blocks of {self._block_size} do not hold "
                    f"{end} positions"
                )


def _adapter_runs(rows: Sequence[Row]) -> tuple[AdapterRun, ...]:
    """The tokens of each adapter; the rows are grouped by it, those without one first."""
    if rows[-1].adapter is None:
        return ()
    runs, end = [], 0
    for adapter, group in groupby(rows, key=lambda row: row.adapter):
        begin, end = end, end + sum(row.num_tokens for row in group)
        if adapter is not None:
            runs.append(AdapterRun(adapter.weights, begin, end))
    return tuple(runs)


def _tokens(row: Row) -> Sequence[int]:
    """The row's tokens, with 0 for those that the token table has."""
    if not row.num_on_device:
        return row.token_ids
    return [*row.token_ids, *[0] * row.num_on_device]


def _is_short(row: Row) -> bool:
    """Whether the row has one token and its drafts, or the two tokens that a draft model computes
    after a step in which all its drafts were accepted."""
    return row.num_tokens <= max(2, 1 + row.num_drafts)


def _end(row: Row) -> int:
    """The row's context length at most, new tokens included."""
    return row.start + row.num_unknown + row.num_tokens
