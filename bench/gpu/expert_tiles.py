"""Measures tiles for layers of experts on this machine's GPU, and prints the rows of the table in
kernels/kvops/triton/expert_tiles.py for the shapes that other tiles than the defaults compute
faster:

    python -m bench.gpu.expert_tiles [--dry-run]

It takes some minutes a shape, most of them for compiling. `--dry-run` measures two candidates
on tiny layers in Triton's interpreter, which tells nothing about a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.gpu.check import Machine
from bench.gpu.experts import in_dtype, moved, randn, weights_of

if TYPE_CHECKING:  # Triton decides at its first import whether it interprets
    from kvops.experts import ExpertWeights
    from kvops.triton.expert_tiles import Tiles

MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral-8x7B": (8, 2, 4096, 14_336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
"""Experts, choices of a row, hidden size and width."""
NUM_ROWS = (1, 64, 4096)
MIN_GAIN = 1.03
"""The mean speed-up from which a row is worth its place: more than the noise of a measurement."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    machine = Machine(parser.parse_args(arguments).dry_run)
    if machine.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    models = {"tiny": (4, 2, 64, 40)} if machine.dry_run else MODELS
    for name, size in models.items():
        print(f"    # {name}", flush=True)
        print(row_of(machine, size), flush=True)


def row_of(machine: Machine, size: tuple[int, int, int, int]) -> str:
    """The row of the table for a layer, or a comment that says that the defaults are best."""
    from kvops.triton.expert_tiles import Row, Tiles
    from kvops.triton.experts import gpu_of, shape_of

    weights = moved(in_dtype(weights_of(*size), machine.half), machine.device)
    defaults = _seconds(machine, weights, Tiles())
    best, times, gain = Tiles(), defaults, 1.0
    for tiles in candidates(machine.dry_run):
        try:
            found = _seconds(machine, weights, tiles)
        except Exception as error:  # too much shared memory, for example
            print(f"    # {tiles}: {type(error).__name__}")
            continue
        ratios = [before / now for before, now in zip(defaults, found, strict=True)]
        if (mean := math.prod(ratios) ** (1 / len(ratios))) > gain:
            best, times, gain = tiles, found, mean
    reason = ", ".join(
        f"{rows:,} rows {before * 1e6:,.0f} -> {now * 1e6:,.0f} us"
        for rows, before, now in zip(_num_rows(machine), defaults, times, strict=True)
    )
    if gain < MIN_GAIN:
        return f"    # the defaults are best: {reason}"
    row = Row(gpu_of(weights.router.device), shape_of(weights, machine.half), best, reason)
    return f"    {row!r},"


def candidates(is_dry: bool) -> Iterator[Tiles]:
    from kvops.triton.expert_tiles import Tiles

    if is_dry:
        yield from (Tiles(16, 32), Tiles(32, 64, 64))
        return
    options = (16, 32, 64, 128), (64, 128), (64, 128), (4, 8), (3, 4)
    yield from itertools.starmap(Tiles, itertools.product(*options))


def _num_rows(machine: Machine) -> tuple[int, ...]:
    return machine.pick(NUM_ROWS, (2,))


def _seconds(machine: Machine, weights: ExpertWeights, tiles: Tiles) -> list[float]:
    from kvops.triton.experts import experts

    found = []
    for num_rows in _num_rows(machine):
        x = randn(num_rows, weights.router.shape[1]).to(machine.device, machine.half)
        chosen, shares = weights.choose(x.float() @ weights.router.T)
        call = partial(experts, x, weights, chosen, shares, tiles)
        found.append(machine.seconds(call))
    return found


if __name__ == "__main__":
    main()
