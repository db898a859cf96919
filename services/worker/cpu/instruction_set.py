"""Chooses the instruction set that a worker computes with.

Results of two instruction sets differ in the last bits, so all workers of a host must use the same
one, and so should two starts of one deployment. The choice is therefore measured once and kept in a
file beside the packed weights. The file's name identifies the CPU, the kernels and the model's
shape.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import xxhash

from kvops import contest
from kvops.native import NUMERICS
from services.common.errors import StartupError
from services.common.runtime.logging import get_logger
from services.engine.weights.packed_file import Progress, locked

log = get_logger(__name__)

_CPUINFO = Path("/proc/cpuinfo")
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode")

Measure = Callable[[Sequence[str], contest.ModelShape], contest.Timings]


def measured_isa(
    shape: contest.ModelShape,
    directory: Path,
    progress: Progress,
    cpuinfo: Path = _CPUINFO,
    measure: Measure = contest.measure,
) -> str | None:
    """The instruction set for models of this shape: from the file in `directory`, or else measured
    and kept there.

    None leaves the choice to the kernels, because this CPU has no candidate.
    StartupError: the directory cannot be written.
    """
    isas = _trusted(contest.contenders())
    if len(isas) < 2:
        return isas[0] if isas else None
    facts: dict[str, object] = {
        **_identity(cpuinfo),
        "kernels": NUMERICS,
        "contenders": list(isas),
        "shape": asdict(shape),
    }
    digest = xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())
    path = directory / f"isa-{digest}.json"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(directory / "isa.lock", progress):
            return _read_choice(path, isas) or _measure_choice(
                path, isas, facts, lambda: measure(isas, shape)
            )
    except OSError as error:
        raise StartupError(f"the choice of instructions {path}: {error.strerror}") from error


def _trusted(isas: Sequence[str]) -> tuple[str, ...]:
    """The sets without `amx` if its results are not those of its emulation: then its hardware or
    its kernels have a fault, and no result of it can be trusted."""
    if "amx" in isas and not contest.same_results("amx", "amx_emulated"):
        log.error("amx_differs_from_its_emulation")
        return tuple(isa for isa in isas if isa != "amx")
    return tuple(isas)


def _read_choice(path: Path, isas: Sequence[str]) -> str | None:
    """The kept choice; None if there is no such file, or if it is damaged."""
    try:
        isa = json.loads(path.read_text())["isa"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return isa if isa in isas else None


def _measure_choice(
    path: Path,
    isas: Sequence[str],
    facts: dict[str, object],
    measure: Callable[[], contest.Timings],
) -> str:
    timings = measure()
    isa = contest.winner(isas, timings)
    times_ms = {
        name: {kernel: round(seconds[turn] * 1000, 3) for kernel, seconds in timings.items()}
        for turn, name in enumerate(isas)
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps({"isa": isa, "times_ms": times_ms, **facts}))
    unfinished.rename(path)
    log.info("instruction_set_measured", isa=isa, path=str(path))
    for name, times in times_ms.items():
        log.debug("instruction_set_timed", isa=name, times_ms=times)
    return isa


def _identity(cpuinfo: Path) -> dict[str, str]:
    """The facts about the first CPU that distinguish CPU models, and versions of one model."""
    found: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _IDENTITY:
            found.setdefault(name.strip(), value.strip())
    return found
