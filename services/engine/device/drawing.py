"""Answers a step's queries where its logits are: tokens are drawn and scored on the device.

The queries' parameters travel to the device with the step's other inputs, in one copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvops import Backend
from kvops.draws import DrawTensors
from services.engine.batch import Draw, Query, Row
from services.engine.device.flights import DrawnFlight
from services.engine.device.inputs import Indices
from services.engine.device.masked import with_masked_rows
from services.engine.device.penalties import DevicePenalties
from services.engine.models import Model
from services.engine.sampling.logprobs import ScoreTensors, score_tensors
from services.engine.sampling.masks import NO_MASKS, StepMasks
from services.engine.sampling.sampler import SMALLEST_TEMPERATURE, least_scaled
from services.engine.sampling.sampling_head import split_states

_DRAW = "draws."


@dataclass(frozen=True, slots=True)
class _Part:
    """States whose logits are computed together, and the queries that ask for their logprobs."""

    states: list[int]
    scored: list[int]


class DeviceDrawing:
    """Draws and scores for one runner. `can_draw`: whether a step's tokens can be drawn here;
    without a sampler for the device, only argmaxes can."""

    def __init__(self, model: Model, ops: Backend, device: torch.device) -> None:
        self._model = model
        self._ops = ops
        self._device = device
        self._penalties = DevicePenalties(device, model.config.vocab_size)

    def can_draw(self, asked: Sequence[Query]) -> bool:
        return self._ops.has_sampler or all(query.is_plain for query in asked)

    def arrays(self, asked: Sequence[Query]) -> dict[str, Indices]:
        """The arrays that `launch` needs on the device."""
        arrays: dict[str, Indices] = {}
        draws = [i for i, query in enumerate(asked) if isinstance(query.token, Draw)]
        number_of = {i: number for number, i in enumerate(draws)}
        for number, part in enumerate(_parts(asked)):
            places = {state: place for place, state in enumerate(part.states)}
            arrays[f"states.{number}"] = np.array(part.states, np.int64)
            if number == 0:
                placed = [replace(asked[i], state=places[asked[i].state]) for i in draws]
                slots, changes = self._penalties.update(placed)
                structured = [i for i, query in enumerate(placed) if query.is_structured]
                arrays["masked"] = np.array([placed[i].state for i in structured], np.int64)
                for row, i in enumerate(structured, len(part.states)):  # see `with_masked_rows`
                    placed[i] = replace(placed[i], state=row)
                arrays |= _draw_arrays(placed, slots) | changes
            scored = [asked[i] for i in part.scored]
            given = [query.token if isinstance(query.token, int) else -1 for query in scored]
            arrays |= {
                f"scored.{number}": np.array([places[query.state] for query in scored], np.int64),
                f"given.{number}": np.array(given, np.int64),
                f"drawn.{number}": np.array([number_of.get(i, 0) for i in part.scored], np.int64),
            }
        return arrays

    def launch(
        self,
        rows: Sequence[Row],
        asked: Sequence[Query],
        hidden: Tensor,
        placed: Mapping[str, Tensor],
        masks: StepMasks = NO_MASKS,
    ) -> DrawnFlight:
        """Draw and score. `hidden`: the final states, [states, hidden_size]. Waits for the masks
        once the forward pass is launched."""
        drawn = torch.empty(0, dtype=torch.int64, device=self._device)
        scores: list[tuple[list[int], ScoreTensors]] = []
        for number, part in enumerate(_parts(asked)):
            states = hidden
            if part.states != list(range(len(hidden))):
                states = hidden.index_select(0, placed[f"states.{number}"])
            logits = self._model.logits(states)
            if any(isinstance(query.token, Draw) for query in asked) and number == 0:
                structured = [masks.mask_of(query) for query in asked if query.is_structured]
                rows_to_draw = logits
                if structured:
                    rows_to_draw = with_masked_rows(logits, placed["masked"], structured)
                drawn = self._draw(rows_to_draw, asked, placed)
            if part.scored:
                token_ids = placed[f"given.{number}"]
                if len(drawn):
                    chosen = drawn[placed[f"drawn.{number}"]].clamp(min=0)  # after a fault: any
                    token_ids = torch.where(token_ids < 0, chosen, token_ids)
                rows_of = logits.index_select(0, placed[f"scored.{number}"])
                num_top = max(asked[i].num_top or 0 for i in part.scored)
                scores.append((part.scored, score_tensors(rows_of, token_ids, num_top)))
        return DrawnFlight(rows, asked, drawn, scores, masks.checked)

    def _draw(self, logits: Tensor, asked: Sequence[Query], placed: Mapping[str, Tensor]) -> Tensor:
        if not self._ops.has_sampler:
            largest, tokens = logits.max(dim=-1)
            return torch.where(largest.isfinite(), tokens, -1)[placed[f"{_DRAW}state"].long()]
        draws = [query.token for query in asked if isinstance(query.token, Draw)]
        hot = [draw.sampling for draw in draws if draw.sampling.temperature > 0]
        tensors = DrawTensors(
            **{
                name.removeprefix(_DRAW): tensor
                for name, tensor in placed.items()
                if name.startswith(_DRAW)
            },
            has_top_k=any(p.top_k for p in hot),
            has_top_p=any(p.top_p < 1 for p in hot),
        )
        is_adjusted = any(draw.adjustment is not None for draw in draws)
        return self._ops.sample(
            logits, tensors, self._penalties.tables(placed) if is_adjusted else None
        )


def _parts(asked: Sequence[Query]) -> list[_Part]:
    """The first part has all states with draws."""
    return [
        _Part(states, [i for i in asking if asked[i].num_top is not None])
        for states, asking in split_states(asked)
    ]


def _draw_arrays(asked: Sequence[Query], slots: Sequence[int]) -> dict[str, Indices]:
    """The fields of `DrawTensors`."""
    drawing = [(query, query.token) for query in asked if isinstance(query.token, Draw)]
    sampling = [draw.sampling for _, draw in drawing]
    heat = [p.temperature and max(p.temperature, SMALLEST_TEMPERATURE) for p in sampling]
    columns: dict[str, Indices] = {
        "state": np.array([query.state for query, _ in drawing], np.int32),
        "temperature": np.array(heat, np.float32),
        "least": np.array([least_scaled(p.min_p) for p in sampling], np.float32),
        "top_k": np.array([min(p.top_k, 2**31 - 1) for p in sampling], np.int32),
        "top_p": np.array([p.top_p for p in sampling], np.float64),
        "seed": np.array([p.seed for p in sampling], np.uint64).view(np.int64),
        "sequence_index": np.array([draw.sequence_index for _, draw in drawing], np.int64),
        "position": np.array([query.position for query, _ in drawing], np.int64),
        "slot": np.array(slots, np.int32),
    }
    for name in ("repetition", "frequency", "presence"):
        values = [getattr(draw.adjustment, name, 0.0) for _, draw in drawing]
        columns[name] = np.array(values, np.float32)
    return {_DRAW + name: array for name, array in columns.items()}
