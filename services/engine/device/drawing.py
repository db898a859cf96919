"""Draws and scores a step's tokens where its logits are: the sampler of a GPU.

The draws' parameters travel to the device with the step's other inputs, in one copy.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvops import Backend
from kvops.draws import DrawTensors
from services.engine.device.inputs import Indices
from services.engine.device.masked import with_masked_rows
from services.engine.device.penalties import DevicePenalties
from services.engine.models import Model
from services.engine.sampling.logprobs import score_tensors
from services.engine.sampling.sampling_batch import SamplingBatch
from services.model.structured.mask import Mask

_DRAW = "draws."


class DeviceDrawing:
    """The sampler of one runner."""

    def __init__(self, model: Model, ops: Backend, device: torch.device) -> None:
        self._model = model
        self._ops = ops
        self._penalties = DevicePenalties(device, model.config.vocab_size)

    def arrays(self, batch: SamplingBatch) -> dict[str, Indices]:
        """The arrays that `draw` needs on the device."""
        slots, changes = self._penalties.update(batch.draws)
        columns, states = {**batch.columns}, batch.columns["state"]
        columns["state"], columns["slot"] = states.copy(), np.array(slots, np.int32)
        for name in ("repetition", "frequency", "presence"):
            values = [getattr(draw.adjustment, name, 0.0) for draw in batch.draws]
            columns[name] = np.array(values, np.float32)
        structured = _structured(batch)
        # See `with_masked_rows`.
        columns["state"][structured] = len(batch.drawing) + np.arange(len(structured))
        return {
            **{_DRAW + name: array for name, array in columns.items()},
            **changes,
            "drawing": np.array(batch.drawing, np.int64),
            "masked": states[structured].astype(np.int64),
            "scored": np.array(batch.scored, np.int64),
            "scored_states": states[batch.scored].astype(np.int64),
        }

    def draw(
        self,
        hidden: Tensor,
        batch: SamplingBatch,
        placed: Mapping[str, Tensor],
        masks: Sequence[Mask | None],
    ) -> Sequence[Tensor]:
        """The tokens of the draws, and the scores of those that ask for them. `hidden` has the
        final states of the step, [states, hidden_size]."""
        if len(batch.drawing) < len(hidden):
            hidden = hidden.index_select(0, placed["drawing"])
        logits = to_draw_from = self._model.logits(hidden)
        if structured := _structured(batch):
            some = [masks[i] for i in structured]
            to_draw_from = with_masked_rows(logits, placed["masked"], some)
        hot = [draw.sampling for draw in batch.draws if draw.sampling.temperature > 0]
        draws = DrawTensors(
            **{n.removeprefix(_DRAW): t for n, t in placed.items() if n.startswith(_DRAW)},
            has_top_k=any(p.top_k for p in hot),
            has_top_p=any(p.top_p < 1 for p in hot),
        )
        is_adjusted = any(draw.adjustment is not None for draw in batch.draws)
        tables = self._penalties.tables(placed) if is_adjusted else None
        tokens = self._ops.sample(to_draw_from, draws, tables)
        if not batch.scored:
            return (tokens,)
        told = tokens[placed["scored"]].clamp(min=0)  # after a fault: any token
        rows = logits.index_select(0, placed["scored_states"])
        return tokens, *score_tensors(rows, told, batch.num_top)


def _structured(batch: SamplingBatch) -> list[int]:
    """The draws with a grammar."""
    return [i for i, draw in enumerate(batch.draws) if draw.grammar is not None]
