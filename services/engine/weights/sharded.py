"""The part of a checkpoint's weights that one rank has (`services.model.checkpoint.shards`)."""

from collections.abc import Mapping

from torch import Tensor

from kvops.quantized import group_of, with_tensors
from services.engine.weights.weights import Form, Weight, Weights
from services.model.checkpoint.shards import INPUTS, Shard, refuse_groups, split_of


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
            if (shard.rank == 0 or not _is_added(name)) and not _is_packed(name)
        }

    def form(self, linear: str) -> Form:
        return self._whole.form(linear)

    def linear(self, linear: str) -> Weight:
        """The rank's part of a linear. Raises StartupError if a part of the inputs of quantized
        weights does not consist of whole groups."""
        weight, name, form = self._whole.linear(linear), f"{linear}.weight", self.form(linear)
        split = split_of(name)
        if isinstance(weight, Tensor):
            return self._part(name, weight)
        if split is None or form == "float":
            return weight
        dimension, divided = split
        part, group = self._shard.part(divided), group_of(form)
        if dimension != INPUTS:
            return with_tensors(weight, lambda name: getattr(weight, name)[part])
        is_cut = part.start % group or (part.stop % group and part.stop < weight.codes.shape[1])
        if is_cut and form != "fp8":  # which has the same scale for all inputs
            raise refuse_groups(self._shard.size, linear, part, group)
        first, num_inputs = part.start // group, part.stop - part.start
        groups = slice(first, first - (-num_inputs // group))
        return with_tensors(
            weight, lambda name: getattr(weight, name)[:, part if name == "codes" else groups]
        )

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".sinks"):
            return tensor[self._shard.heads]
        split = split_of(name)
        if split is None or _is_added(name):
            return tensor
        dimension, divided = split
        part = self._shard.part(divided)
        return tensor[:, part] if dimension == INPUTS else tensor[part]


def _is_packed(name: str) -> bool:
    """Whether this is a part of a quantized linear, which `linear` decodes whole."""
    return split_of(name) is not None and not name.endswith((".weight", ".bias"))


def _is_added(name: str) -> bool:
    """Whether this is a bias of the sum of the ranks' outputs."""
    split = split_of(name)
    return split is not None and split[0] == INPUTS and name.endswith(".bias")
