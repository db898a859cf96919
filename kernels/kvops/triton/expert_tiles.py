"""How layers of experts are divided among programs: a table by GPU and shape.

`python -m bench.gpu.expert_tiles` measures candidates on the GPU of its machine, and prints a row
for each shape that another division computes faster. A row changes the bits of results, so
`kvops.triton.NUMERICS` changes with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a layer. The number of rows is no part of it and chooses no tiles, so that a row
    has the same bits in every batch."""

    num_experts: int
    hidden: int
    width: int
    form: str
    """The form of quantized weights (`GroupedWeight.form`), or the dtype of others."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The part of a program. The defaults are for every GPU and shape without a row: they fit into
    the shared memory of all GPUs since capability 8.0, and 64 lines fill a tensor core's tile."""

    lines: int = 64
    """The places of one expert that a program computes."""
    outputs: int = 64
    """The outputs that a program computes."""
    input_bytes: int = 128
    """The bytes of a line that a program reads at once, if the weights are not quantized."""
    num_warps: int = 4
    num_stages: int = 3
    """The loads that are under way at once, and the products."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    gpu: str
    """The name of the GPU, as `torch.cuda.get_device_name` gives it."""
    shape: Shape
    tiles: Tiles
    reason: str
    """The times that chose these tiles, beside those of the defaults."""


ROWS: tuple[Row, ...] = ()
"""Nobody has measured candidates on a GPU yet."""


def tiles_for(gpu: str, shape: Shape, rows: Sequence[Row] = ROWS) -> Tiles:
    """The tiles of the row for this GPU and shape, or the defaults if the table has none."""
    found = (row.tiles for row in rows if (row.gpu, row.shape) == (gpu, shape))
    return next(found, Tiles())
