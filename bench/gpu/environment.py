"""Names the machine, and checks that it can run the other checks at all."""

import platform
from collections.abc import Iterator

import torch

import kvops
from bench.gpu.check import Check, Failed, Machine, Passed


def checks(machine: Machine) -> Iterator[Check]:
    yield "PyTorch, Triton and a GPU", lambda: _environment(machine)


def _environment(machine: Machine) -> Passed:
    try:
        backend = kvops.backend("triton")
    except kvops.BackendUnavailable as error:
        raise Failed(str(error)) from error
    figures: dict[str, float | str] = {**backend.numerics(machine.half)}
    figures["python"] = platform.python_version()
    if not machine.dry_run:
        figures["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
        figures["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return Passed(", ".join(f"{name} {value}" for name, value in figures.items()), figures)
