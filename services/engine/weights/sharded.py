"""The part of a checkpoint's weights that one rank has (`services.model.checkpoint.shards`)."""

from collections.abc import Mapping

from torch import Tensor

from kvops.fp4 import Float4Weight
from kvops.fp8 import Float8Weight
from kvops.int8 import Int8Weight
from services.engine.weights.weights import Form, Weights
from services.model.checkpoint.shards import INPUTS, Shard, refuse_kind, split_of


class ShardedWeights:
    """`Weights` of one rank: views of the mapped checkpoint, so that a rank reads its part only.

    The bias of a linear that is split along its inputs belongs to rank 0, because the ranks'
    outputs are added up.
    """

    def __init__(self, whole: Weights, shard: Shard) -> None:
        self._whole = whole
        self._shard = shard
        self.tensors: Mapping[str, Tensor] = {
            name: self._part(name, tensor)
            for name, tensor in whole.tensors.items()
            if shard.rank == 0 or not _is_added(name)
        }

    def form(self, linear: str) -> Form:
        return self._whole.form(linear)

    def linear(self, linear: str) -> Tensor:
        """The rank's part of a linear in floating point, also of a linear of 8 bits, since a part
        may begin in the middle of a group. Raises StartupError if the linear has another form."""
        weight = self._whole.linear(linear)
        if isinstance(weight, Int8Weight | Float8Weight | Float4Weight):
            weight = weight.dequantized()
        if not isinstance(weight, Tensor):
            raise refuse_kind(self._shard.size, self.form(linear))
        return self._part(f"{linear}.weight", weight)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".sinks"):
            return tensor[self._shard.heads]
        split = split_of(name)
        if split is None or _is_added(name):
            return tensor
        dimension, divided = split
        part = self._shard.part(divided)
        return tensor[:, part] if dimension == INPUTS else tensor[part]


def _is_added(name: str) -> bool:
    """Whether this is a bias of the sum of the ranks' outputs."""
    split = split_of(name)
    return split is not None and split[0] == INPUTS and name.endswith(".bias")
