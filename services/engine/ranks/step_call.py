"""The call of a step. The tensors of the step follow from device to device, as the bytes of one
broadcast."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from services.engine.device.steps import STEP_TENSORS, StepFacts


@dataclass(frozen=True, slots=True, eq=False)
class StepCall:
    """A step, as rank 0 calls it."""

    facts: StepFacts
    """The facts of the step; an adapter is its number."""
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """The shape and the dtype of each tensor that follows, in the order of the broadcast. Wider
    dtypes come first, so that each tensor is aligned."""

    @property
    def num_bytes(self) -> list[int]:
        """The sizes of the tensors in the broadcast that follows."""
        return [prod(shape) * dtype.itemsize for shape, dtype in self.forms.values()]

    def unpacked(self, octets: Tensor) -> dict[str, Tensor]:
        """The tensors of the broadcast, which are views of it."""
        parts = zip(self.forms.items(), torch.split(octets, self.num_bytes), strict=True)
        return {name: part.view(dtype).view(shape) for (name, (shape, dtype)), part in parts}


def called(placed: Mapping[str, Tensor], facts: StepFacts) -> tuple[StepCall, Tensor]:
    """The call of a step, and the bytes of its tensors."""
    sent = [(name, placed[name]) for name in STEP_TENSORS if name in placed]
    sent.sort(key=lambda named: named[1].itemsize, reverse=True)
    call = StepCall(facts, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in sent})
    # NumPy's empty arrays have a stride with which PyTorch does not view them as bytes.
    full = (tensor.reshape(-1) for _, tensor in sent if tensor.numel())
    return call, torch.cat([tensor.view(torch.uint8) for tensor in full])
