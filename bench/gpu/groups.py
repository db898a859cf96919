"""The groups of checks, and how a group runs."""

import json
import platform
import time
import traceback
from collections.abc import Iterator
from importlib import import_module

import torch

import kvops
from bench.gpu import sharing
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped


def environment(machine: Machine) -> Iterator[Check]:
    """Name the machine, and check that it can run the other checks at all."""
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


MODULES = (
    *("attention", "operations", "linears", "experts", "arena", "sharing", "sampling", "model"),
    *("decode", "speed", "deployment", "loads"),
)
"""The groups that are a module with a function `checks`. Each group imports all of them."""


def run_group(group: str, dry_run: bool) -> None:
    """Print the result of each check as a line of JSON. An error fails its check only."""
    machine, modules = Machine(dry_run), [import_module(f"bench.gpu.{name}") for name in MODULES]
    groups = dict(zip(MODULES, (module.checks for module in modules), strict=True))
    groups |= {"environment": environment, "peers": sharing.peer_checks}
    for name, check in groups[group](machine):
        began, figures = time.monotonic(), {}
        try:
            passed = check()
            machine.synchronize()
            status, detail, figures = "ok", passed.detail, passed.figures
        except Skipped as skipped:
            status, detail = "skipped", str(skipped)
        except Failed as failed:
            status, detail = "FAILED", str(failed)
        except Exception as error:
            traceback.print_exc()
            status, detail = "FAILED", f"{type(error).__name__}: {error}"
        result = {
            "name": name,
            "status": status,
            "detail": " ".join(detail.split())[:300],
            "seconds": round(time.monotonic() - began, 2),
            "figures": figures,
        }
        print(json.dumps(result), flush=True)
