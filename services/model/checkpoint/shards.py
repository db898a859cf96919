"""Divides a model among the ranks of a worker (tensor parallelism): which part of each weight a
rank has. No PyTorch here.

Query heads, the MLP's inner dimension and the vocabulary are divided. A linear that produces a
divided dimension is split along its outputs (column-parallel); one that reads it is split along its
inputs (row-parallel), and the ranks' outputs are added up. Key and value heads are divided like
query heads; if there are fewer of them than ranks, several ranks have copies of one head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from services.model.config.model_config import ModelConfig
from services.runtime.errors import StartupError

SIZES = (1, 2, 4, 8)
"""The numbers of ranks that a worker may have."""

Dimension = Literal["heads", "kv_heads", "mlp", "experts", "vocabulary"]

OUTPUTS, INPUTS = 0, 1

SPLITS: Mapping[str, tuple[int, Dimension]] = {
    "embed_tokens": (OUTPUTS, "vocabulary"),
    "q_proj": (OUTPUTS, "heads"),
    "k_proj": (OUTPUTS, "kv_heads"),
    "v_proj": (OUTPUTS, "kv_heads"),
    "o_proj": (INPUTS, "heads"),
    "gate_proj": (OUTPUTS, "mlp"),
    "up_proj": (OUTPUTS, "mlp"),
    "down_proj": (INPUTS, "mlp"),
    "w1": (OUTPUTS, "experts"),
    "w3": (OUTPUTS, "experts"),
    "w2": (INPUTS, "experts"),
    "lm_head": (OUTPUTS, "vocabulary"),
}
"""By the last part of a weight's name: along which dimension it is split, and what that is. Norms
and routers are not here: every rank has them whole."""


def split_of(name: str) -> tuple[int, Dimension] | None:
    """How the tensor with this name is split; None if every rank has it whole."""
    split = SPLITS.get(name.split(".")[-2])
    if split is not None and ".experts." in name:
        return split[0], "experts"
    return split


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank of `size` has."""

    config: ModelConfig
    rank: int
    size: int

    @property
    def own_config(self) -> ModelConfig:
        """The rank's own model: its heads, its part of the MLP, and the whole vocabulary."""
        c = self.config
        return replace(
            c,
            num_heads=c.num_heads // self.size,
            num_kv_heads=max(1, c.num_kv_heads // self.size),
            intermediate_size=c.intermediate_size // self.size,
            experts=c.experts and replace(c.experts, width=c.experts.width // self.size),
        )

    @property
    def heads(self) -> slice:
        """The rank's query heads."""
        return self._equal(self.config.num_heads)

    def part(self, dimension: Dimension) -> slice:
        """The rank's part of a dimension of the weights."""
        c = self.config
        match dimension:
            case "heads":
                return self._equal(c.num_heads * c.head_dim)
            case "kv_heads" if c.num_kv_heads < self.size:
                head = self.rank * c.num_kv_heads // self.size
                return slice(head * c.head_dim, (head + 1) * c.head_dim)
            case "kv_heads":
                return self._equal(c.num_kv_heads * c.head_dim)
            case "mlp":
                return self._equal(c.intermediate_size)
            case "experts":
                assert c.experts is not None
                return self._equal(c.experts.width)
            case "vocabulary":
                return self.vocabulary

    @property
    def vocabulary(self) -> slice:
        """The rank's tokens. If they cannot be divided, the first ranks have one more."""
        return slice(self._first_token(self.rank), self._first_token(self.rank + 1))

    def _first_token(self, rank: int) -> int:
        each, more = divmod(self.config.vocab_size, self.size)
        return rank * each + min(rank, more)

    def _equal(self, width: int) -> slice:
        each = width // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def shards(config: ModelConfig, size: int) -> tuple[Shard, ...]:
    """The parts of all ranks. StartupError, with the numbers: the model cannot be divided so."""
    check_shards(config, size)
    return tuple(Shard(config, rank, size) for rank in range(size))


def check_shards(config: ModelConfig, size: int) -> None:
    """Raises StartupError, with the numbers, if this model cannot be divided among `size` ranks."""
    if size == 1:
        return
    for number, name in (
        (config.num_heads, "query heads"),
        (config.intermediate_size, "columns of the MLP"),
        (0 if config.experts is None else config.experts.width, "columns of an expert"),
    ):
        if number % size:
            raise _refusal(size, f"{number} {name} are not a multiple of it")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise _refusal(
            size,
            f"{config.num_kv_heads} key/value heads are neither a multiple nor a divisor of it",
        )
    if config.family.qk_norm == "all heads":
        raise _refusal(size, f"the norm over all heads of {config.architecture} is not divided")
    if config.vocab_size < size:
        raise _refusal(size, f"a vocabulary of {config.vocab_size} has fewer tokens")


def refuse_kind(size: int, kind: str) -> StartupError:
    return _refusal(size, f"--quantize {kind} with several ranks needs GPUs")


def refuse_groups(size: int, linear: str, part: slice, group: int) -> StartupError:
    """The refusal of a linear with a part of inputs that does not consist of whole groups."""
    return _refusal(
        size,
        f"inputs {part.start} to {part.stop} of {linear} are no whole groups of {group}, which "
        "share a scale; or serve the weights in floating point: --quantize none",
    )


def _refusal(size: int, text: str) -> StartupError:
    return StartupError(f"tensor_parallel_size {size}: {text}; choose another size")
