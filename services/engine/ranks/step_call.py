"""The message that calls a step: numbers, because pickles would take most of the time of a call.

    | 16 counts | number, begin, end of each adapter | query_begins | context_lens |   int32 each

The tensors of the step follow from device to device, as the bytes of one broadcast.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.device.graphs import GraphShape
from services.engine.device.steps import STEP_TENSORS, StepFacts
from services.engine.models.model import AdapterRun

_IN_INT32 = ("block_tables", "cu_query_lens", "context_lens", "page_ids")
_DTYPES = {
    name: torch.int32 if name in _IN_INT32 else torch.int64
    for name in sorted(STEP_TENSORS, key=_IN_INT32.__contains__)
}
"""The dtypes of a step's tensors, in the order of the broadcast: int64 comes first, so that each
tensor is aligned."""

_NUM_FACTS = 8
_NUM_COUNTS = _NUM_FACTS + len(_DTYPES)
_ABSENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepCall:
    """A step, as rank 0 calls it."""

    facts: StepFacts
    """The facts of the step; an adapter is its number."""
    sizes: Mapping[str, int]
    """The number of values of each tensor that follows, in the order of `_DTYPES`."""

    def encode(self) -> bytes:
        facts, graph = self.facts, self.facts.graph or GraphShape(0, 0, 0)
        numbers = [
            *(len(facts.context_lens), facts.num_tokens, facts.wants_all, len(facts.adapters)),
            *(graph.num_tokens, graph.num_rows, graph.query_len, graph.has_adapters),
            *(self.sizes.get(name, _ABSENT) for name in _DTYPES),
            *(n for run in facts.adapters for n in (run.adapter, run.begin, run.end)),
        ]
        parts = np.array(numbers), facts.query_begins, facts.context_lens
        return np.concatenate(parts).astype("<i4").tobytes()

    @classmethod
    def decode(cls, octets: bytes) -> "StepCall":
        """The step of these bytes, which `encode` of rank 0 has made."""
        values = np.frombuffer(octets, "<i4").copy()  # attention takes no arrays that are read only
        counts = values[:_NUM_COUNTS].tolist()
        num_rows, num_tokens, wants_all, num_runs, *graph = counts[:_NUM_FACTS]
        padded_tokens, padded_rows, query_len, has_adapters = graph
        shape = GraphShape(padded_tokens, padded_rows, query_len, bool(has_adapters))
        ends = np.cumsum([_NUM_COUNTS, 3 * num_runs, num_rows + 1])
        _, runs, query_begins, context_lens = np.split(values, ends)
        facts = StepFacts(
            query_begins,
            context_lens,
            num_tokens,
            graph=shape if any(graph) else None,
            wants_all=bool(wants_all),
            adapters=tuple(AdapterRun(*run) for run in runs.reshape(-1, 3).tolist()),
        )
        sizes = dict(zip(_DTYPES, counts[_NUM_FACTS:], strict=True))
        return cls(facts, {name: size for name, size in sizes.items() if size != _ABSENT})

    @property
    def num_bytes(self) -> list[int]:
        """The sizes of the tensors in the broadcast that follows."""
        return [size * _DTYPES[name].itemsize for name, size in self.sizes.items()]

    def unpacked(self, octets: Tensor) -> dict[str, Tensor]:
        """The tensors of the broadcast, which are views of it."""
        parts = zip(self.sizes, torch.split(octets, self.num_bytes), strict=True)
        placed = {name: part.view(_DTYPES[name]) for name, part in parts}
        tables = placed["block_tables"].view(len(self.facts.context_lens), -1)
        return {**placed, "block_tables": tables}


def called(placed: Mapping[str, Tensor], facts: StepFacts) -> tuple[StepCall, Tensor]:
    """The call of a step, and the bytes of its tensors."""
    flat = {name: placed[name].reshape(-1) for name in _DTYPES if name in placed}
    call = StepCall(facts, {name: len(tensor) for name, tensor in flat.items()})
    # NumPy's empty arrays have a stride with which PyTorch does not view them as bytes.
    return call, torch.cat([tensor.view(torch.uint8) for tensor in flat.values() if len(tensor)])
