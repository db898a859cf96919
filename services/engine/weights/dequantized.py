"""Serves linears that a checkpoint has quantized in floating point."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from services.engine.weights.weights import Form, Weight, Weights


@dataclass(frozen=True, slots=True)
class DequantizedWeights:
    """The `Weights` of a checkpoint with all linears of some forms in floating point."""

    weights: Weights
    forms: Collection[Form] | None = None
    """None for all forms."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.weights.tensors

    def form(self, linear: str) -> Form:
        form = self.weights.form(linear)
        return "float" if self.forms is None or form in self.forms else form

    def linear(self, linear: str) -> Weight:
        weight = self.weights.linear(linear)
        if isinstance(weight, Tensor) or self.form(linear) != "float":
            return weight
        return weight.dequantized()
