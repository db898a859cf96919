"""The interface between a checkpoint's format and the models that are made from it."""

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

from kvops.grouped import AnyWeight
from services.model.config.quantization import StoredKind

Weight = AnyWeight
"""The weights [N, K] of one linear of a checkpoint."""

Form = StoredKind | Literal["float"]
"""The form of a linear's weights in the checkpoint."""


class Weights(Protocol):
    """A checkpoint's weights. `linear` converts at each call, so that no more than one linear is in
    memory."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that are not a linear's weights, and the weights of linears in floating
        point. They may be views of a mapped file."""
        ...

    def form(self, linear: str) -> Form:
        """The form of the linear with this name, which does not end with `.weight`."""
        ...

    def linear(self, linear: str) -> Weight:
        """The weights of a linear. A linear of a form other than float may be dequantized: then no
        kind has exactly its weights. Raises StartupError if the stored values contradict the
        format."""
        ...
