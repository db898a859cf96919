"""The device's sampler compiles for GPUs without one."""

from pathlib import Path

import pytest
import torch

from kvops.draws import DRAW_DTYPES, DrawTensors, PenaltyTables
from kvops.triton.sampling import sample, warm_up

from .test_triton_compile import compiling


def draws(num: int) -> DrawTensors:
    zeros = {name: torch.zeros(num, dtype=dtype) for name, dtype in DRAW_DTYPES.items()}
    return DrawTensors(**zeros, has_top_k=True, has_top_p=True)


@pytest.mark.parametrize(
    "capability", [80, *(pytest.param(number, marks=pytest.mark.full) for number in (90, 100))]
)
def test_the_sampler_is_compiled_when_it_is_warm(tmp_path: Path, capability: int) -> None:
    """`warm_up` compiles all variants, with and without penalties."""
    shape = (2, 151_936)
    tables = PenaltyTables(
        torch.zeros(shape), torch.zeros(shape).int(), torch.zeros(shape, dtype=torch.int8)
    )
    with compiling(capability, tmp_path) as compiled:
        warm_up(shape[1], "cpu")
        warm = set(map(id, compiled))
        for num_draws in (1, 2, 3, 16, 64):
            for some in (tables, None):
                sample(torch.zeros(num_draws, shape[1]), draws(num_draws), some)
    assert set(map(id, compiled)) == warm
    kernels = {id(kernel): kernel for kernel in compiled}.values()
    names = ["finish", "look", "race", "search", "search"]  # by number, and by weight
    assert sorted(kernel.metadata.name for kernel in kernels) == sorted(2 * names)
