"""Serves a quantized checkpoint in floating point."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from services.engine.weights.weights import Form, Weights


@dataclass(frozen=True, slots=True)
class DequantizedWeights:
    """The `Weights` of a checkpoint with all of its linears in floating point."""

    weights: Weights

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.weights.tensors

    def form(self, linear: str) -> Form:
        return "float"

    def linear(self, linear: str) -> Tensor:
        weight = self.weights.linear(linear)
        return weight if isinstance(weight, Tensor) else weight.dequantized()
