"""The device's sampler compiles for GPUs without one. Its PTX has no operation whose bits could
differ from the reference's: none is fused, approximate or without denormals."""

import re
from pathlib import Path

import pytest
import torch

from kvops.draws import DrawTensors, PenaltyTables
from kvops.triton.sampling import sample, warm_up

from .test_triton_compile import compiling

INEXACT = re.compile(
    r"\b(?:fma|mad)\.\w*\.?f32|\.(?:approx|full|ftz)\b|\b(?:mul|add|sub)\.f(?:32|64)"
)
"""The assembler may fuse an operation without `.rn`."""


def draws(num: int) -> DrawTensors:
    fp32, int32, int64 = torch.zeros(num), torch.zeros(num).int(), torch.zeros(num).long()
    return DrawTensors(
        state=int32,
        temperature=fp32,
        least=fp32,
        top_k=int32,
        top_p=fp32.double(),
        seed=int64,
        sequence_index=int64,
        position=int64,
        slot=int32,
        repetition=fp32,
        frequency=fp32,
        presence=fp32,
        has_top_k=True,
        has_top_p=True,
    )


@pytest.mark.parametrize(
    "capability", [80, *(pytest.param(number, marks=pytest.mark.full) for number in (90, 100))]
)
def test_the_sampler_compiles_to_exact_operations(tmp_path: Path, capability: int) -> None:
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
    for kernel in kernels:
        assert not INEXACT.findall(kernel.asm["ptx"]), kernel.metadata.name
