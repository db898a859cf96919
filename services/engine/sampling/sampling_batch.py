"""The draws and scores that the rows of a step need from its final states, as arrays that are built
once a step, and the rows' results.

    row     |--- tokens scored ---|------|-end-|     states: one for each token that the row scores,
    states   s s s s s s s s s s s         d         and the last one if the row has any draws; or
                                                     the last `num_states` ones

    row     | token |------ drafts ------|           a row with drafts: a state for each of its
    states      d     d   d   d   d   d              draws
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from services.engine.batch import Draw, Fault, Row, RowOutput, RowResult
from services.engine.sampling.arithmetic import SMALLEST_TEMPERATURE, least_scaled
from services.engine.sampling.logprobs import columns_of, scores_of
from services.model.structured.mask import Mask
from services.protocol.logprobs import Logprobs

Indices = np.ndarray[Any, np.dtype[Any]]

NOT_FINITE = -1
"""Stands for the token of a draw from logits that are not finite."""

LOGITS_AT_ONCE = 64
"""How many rows of a prompt's logits are in memory at once: 64 rows of 150,000 tokens are 39 MB."""

Outputs = Sequence[Sequence[Tensor]]
"""The tensors that a step has computed for its batch, on any device. First the tokens of the draws,
[D] int64, and behind them the scores (`logprobs.ScoreTensors`) of the draws that ask for logprobs.
Then for each row of `SamplingBatch.apart`: the scores of its prompt's tokens, or its states to
pool."""


@dataclass(slots=True, eq=False)
class SamplingBatch:
    """D draws, and the states that they and other rows need."""

    draws: Sequence[Draw]
    positions: Sequence[int]
    """The position of each draw's token."""
    states: Sequence[int]
    """The state of each draw, as a place in `drawing`."""
    rows: Sequence[Row] = ()
    wanted: Sequence[int] = ()
    """The states that the rows need, as ascending indices into the tokens of the step."""
    drawing: Sequence[int] = ()
    """The states that draw, as ascending places in `wanted`."""
    apart: Sequence[tuple[int, slice]] = ()
    """The rows that score tokens or need the states themselves, with these states' places in
    `wanted`."""
    columns: dict[str, Indices] = field(init=False)
    """The draws' parameters, an array [D] each, in the dtypes of `kvops.draws.DRAW_DTYPES`."""
    scored: Sequence[int] = field(init=False)
    """The draws that ask for logprobs."""
    num_top: int = field(init=False)
    """How many of the likeliest tokens these draws ask for at most."""

    def __post_init__(self) -> None:
        params = [draw.sampling for draw in self.draws]
        temperatures = (p.temperature for p in params)
        heat = [max(t, SMALLEST_TEMPERATURE) if t > 0 else t for t in temperatures]
        self.columns = {
            "state": np.array(self.states, np.int32),
            "temperature": np.array(heat, np.float32),
            "least": np.array([least_scaled(p.min_p) for p in params], np.float32),
            "top_k": np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float64),
            "seed": np.array([p.seed for p in params], np.uint64).view(np.int64),
            "sequence_index": np.array([draw.sequence_index for draw in self.draws], np.int64),
            "position": np.array(self.positions, np.int64),
        }
        self.scored = [i for i, p in enumerate(params) if p.logprobs is not None]
        self.num_top = max((params[i].logprobs or 0 for i in self.scored), default=0)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "SamplingBatch":
        draws, positions, states = list[Draw](), list[int](), list[int]()
        wanted, drawing, apart = list[int](), list[int](), list[tuple[int, slice]]()
        end = 0
        for number, row in enumerate(rows):
            begin, end = end, end + row.num_tokens
            if row.scoring is not None or row.num_states:
                first, num_scored = len(wanted), len(row.scoring.token_ids) if row.scoring else 0
                wanted += range(begin, begin + num_scored)
                wanted += range(end - row.num_states, end)
                apart.append((number, slice(first, len(wanted))))
            if not row.draws:
                continue
            position = row.start + (end - begin) - row.num_drafts
            for place, draw in enumerate(row.draws):
                behind = place if row.num_drafts else 0  # without drafts, all draw after one token
                draws.append(draw)
                positions.append(position + behind)
                states.append(len(drawing) + behind)
            drawing += range(len(wanted), len(wanted) + row.num_drafts + 1)
            wanted += range(end - 1 - row.num_drafts, end)
        return cls(draws, positions, states, rows, wanted, drawing, apart)

    def states_of(self, hidden: Tensor) -> Tensor:
        """The states that draw, of all that are `wanted`."""
        return hidden if len(self.drawing) == len(self.wanted) else hidden[self.drawing]

    def first_draws(self, rows: Sequence[int]) -> Indices:
        """The index of the first draw of each of these rows."""
        begins = np.cumsum([0, *(len(row.draws) for row in self.rows)])
        return begins[np.array(rows, np.int64)]

    def results(self, outputs: Outputs, masks: Sequence[Mask | None]) -> list[RowResult]:
        """The results of the rows. `sampling.masks` gives `masks`."""
        (drawn, *scores), *others = outputs
        tokens: list[int] = drawn.tolist()
        logprobs: dict[int, Logprobs | Fault] = {}
        if scores:
            logprobs = dict(zip(self.scored, scores_of(*scores), strict=True))
        apart = dict(zip((number for number, _ in self.apart), others, strict=True))
        results, begin = list[RowResult](), 0
        for number, row in enumerate(self.rows):
            indices = range(begin, begin + len(row.draws))
            begin += len(row.draws)
            result = self._drawn(row, tokens, logprobs, indices, masks) if indices else ()
            if number in apart and not isinstance(result, Fault):
                result = _with_apart(row, result, apart[number])
            results.append(result)
        return results

    def _drawn(
        self,
        row: Row,
        tokens: Sequence[int],
        logprobs: dict[int, Logprobs | Fault],
        indices: range,
        masks: Sequence[Mask | None],
    ) -> RowResult:
        """The result of a row's draws. The draws of a row with drafts end before the first fault,
        which may follow from a wrong draft. If it does not, the next step finds it again."""
        told: list[Logprobs] = []
        for place, i in enumerate(indices):
            fault: Fault | None = None
            if self.draws[i].grammar is not None and masks[i] is None:
                fault = Fault.GRAMMAR
            elif tokens[i] == NOT_FINITE:
                fault = Fault.NOT_FINITE
            elif (one := logprobs.get(i)) is not None:
                if isinstance(one, Fault):
                    fault = one
                else:
                    told.append(_cut(one, self.draws[i].sampling.logprobs))
            if fault is not None:
                if place == 0 or not row.num_drafts:
                    return fault
                indices = indices[:place]
                break
        drawn = tuple(tokens[indices.start : indices.stop])
        return RowOutput(drawn, tuple(told)) if told else drawn


def _with_apart(row: Row, drawn: tuple[int, ...] | RowOutput, found: Sequence[Tensor]) -> RowResult:
    """The result with the row's states, or the scores of its prompt's tokens."""
    output = drawn if isinstance(drawn, RowOutput) else RowOutput(drawn)
    if row.num_states:
        states = found[0].numpy()
        return replace(output, states=states) if np.isfinite(states).all() else Fault.NOT_FINITE
    token_ids, logprobs, ranks = found
    prompt = columns_of(token_ids, logprobs, ranks)
    return prompt if isinstance(prompt, Fault) else replace(output, prompt=prompt)


def _cut(found: Logprobs, num_top: int | None) -> Logprobs:
    """The logprobs with no more of the likeliest tokens than a draw asks for."""
    if len(found.top_token_ids) <= (num_top or 0):
        return found
    ids, logprobs = found.top_token_ids[:num_top], found.top_logprobs[:num_top]
    return replace(found, top_token_ids=ids, top_logprobs=logprobs)
