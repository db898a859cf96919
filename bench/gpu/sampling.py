"""Draws on the device, against the same draws on the CPU: equal tokens, not nearly."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvops
from bench.gpu.check import Check, Failed, Machine, Passed
from services.engine.batch import Draw, Fault, Query
from services.engine.device.drawing import DeviceDrawing
from services.engine.device.inputs import StepInputs
from services.engine.sampling.sampler import sample
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
KINDS: dict[str, dict[str, Any]] = {
    "argmaxes": {"temperature": 0},
    "temperatures": {"temperature": 0.7},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 1.5, "top_k": 200, "top_p": 0.9, "min_p": 0.001},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3},
}
MAX_SECONDS = 1e-3
"""For 64 draws of the kind that takes longest: less than a tenth of a step."""


class Head:
    """A head whose states are the logits: all of a model that drawing needs."""

    def __init__(self, vocab_size: int) -> None:
        self.config = type("Config", (), {"vocab_size": vocab_size})

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def checks(machine: Machine) -> Iterator[Check]:
    for name in KINDS:
        yield f"draws are the CPU's, {name}", partial(_draws, machine, name)
    yield "time of draws", lambda: _speed(machine)


def _queries(kind: str, num: int, seed: int) -> list[Query]:
    queries = []
    for row in range(num):
        p = replace(PLAIN, seed=seed * 1000 + row, **KINDS[kind])
        state = PenaltyState(p, [1, 2, 3, row, 3, 3], 2, [])
        adjustment = state.adjustment() if PenaltyState.is_needed(p) else None
        queries.append(Query(row, Draw(p, row % 3, adjustment), 100 * seed + row))
    return queries


def _drawing(machine: Machine, vocab_size: int) -> DeviceDrawing:
    head: Any = Head(vocab_size)
    return DeviceDrawing(head, kvops.backend("triton"), torch.device(machine.device))


def _draws(machine: Machine, kind: str) -> Passed:
    num_rows, vocab_size = machine.pick(64, 3), machine.pick(151_936, 300)
    drawing = _drawing(machine, vocab_size)
    inputs = StepInputs(torch.device(machine.device))
    generator = torch.Generator().manual_seed(1)
    num_draws = 0
    for seed in range(machine.pick(30, 1)):
        logits = torch.randn(num_rows, vocab_size, generator=generator) * (1 + seed % 5)
        logits[:, ::97] = float("-inf")
        asked = _queries(kind, num_rows, seed)
        placed = inputs.place(drawing.arrays(asked))
        found = drawing.launch([], asked, logits.to(machine.device), placed).drawn.tolist()
        draws = [query.token for query in asked if isinstance(query.token, Draw)]
        wanted = sample(logits, draws, [query.position for query in asked])
        differing = sum(a != b for a, b in zip(found, wanted, strict=True))
        if differing or any(isinstance(token, Fault) for token in wanted):
            raise Failed(f"{differing} of {num_rows} tokens differ, after {num_draws} equal ones")
        num_draws += num_rows
    return Passed(f"{num_draws} equal draws of {vocab_size} tokens")


def _speed(machine: Machine) -> Passed:
    num_rows, vocab_size = machine.pick(64, 2), machine.pick(151_936, 300)
    drawing = _drawing(machine, vocab_size)
    logits = 3 * torch.randn(num_rows, vocab_size, device=machine.device)
    figures: dict[str, float | str] = {}
    for kind in ("argmaxes", "temperatures", "all filters"):
        asked = _queries(kind, num_rows, 1)
        placed = StepInputs(torch.device(machine.device)).place(drawing.arrays(asked))
        figures[kind] = machine.seconds(partial(drawing.launch, [], asked, logits, placed))
    text = ", ".join(f"{kind} {float(s) * 1e6:,.0f} us" for kind, s in figures.items())
    if not machine.dry_run and float(figures["all filters"]) > MAX_SECONDS:
        raise Failed(f"{num_rows} draws: {text}; at most {MAX_SECONDS * 1e6:,.0f} us are allowed")
    return Passed(f"{num_rows} draws: {text}", figures)
