"""The device's sampler compiles for GPUs without one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    names = ["choose", "look", "race", "survey"]
    assert sorted(kernel.metadata.name for kernel in kernels) == sorted(2 * names)
    for kernel in kernels:
        if kernel.metadata.name in ("choose", "race"):
            before, *arrivals = kernel.asm["ptx"].split("atom.global.gpu.acq_rel.add")
            assert len(arrivals) == 1
            # All of the program has stored when it arrives, and knows whether it is the last.
            assert "bar.sync" in before.rpartition("st.global")[2]
            assert "bar.sync" in arrivals[0].partition("ld.global")[0]


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of PyTorch that compute anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket.__name__ != "empty":
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("filters", "adjusted", "expected"),
    [
        ((False, False), False, ["look", "race"]),  # greedy, or only a temperature
        ((False, True), False, ["look", "survey", "choose", "race"]),
        ((True, False), False, ["look", "survey", "choose", "race"]),
        ((True, True), False, ["look", "survey", "choose", "race"]),
        ((False, False), True, ["look", "race"]),
        ((True, True), True, ["look", "survey", "choose", "race"]),
    ],
)
def test_a_batch_takes_few_launches(
    tmp_path: Path, filters: tuple[bool, bool], adjusted: bool, expected: list[str]
) -> None:
    """However many draws there are. Nothing else is launched, such as zeros for a counter."""
    shape = (3, 151_936)
    tables = PenaltyTables(
        torch.zeros(shape), torch.zeros(shape).int(), torch.zeros(shape, dtype=torch.int8)
    )
    for num_draws in (1, 64):
        asked = replace(draws(num_draws), has_top_k=filters[0], has_top_p=filters[1])
        logits = torch.zeros(num_draws, shape[1])
        with compiling(80, tmp_path) as compiled, Launches() as others:
            sample(logits, asked, tables if adjusted else None)
        assert [kernel.metadata.name for kernel in compiled] == expected
        assert others.names == []
