"""Draws on the device, against what the filters leave on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.check import Check, Failed, Machine, Passed, micros
from services.engine.batch import Draw
from services.engine.device.drawing import DeviceDrawing
from services.engine.device.inputs import StepInputs
from services.engine.sampling.sampler import filtered_weights
from services.engine.sampling.sampling_batch import SamplingBatch
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
        yield f"draws follow the CPU's filters, {name}", partial(_draws, machine, name)
    yield "time of draws", lambda: _speed(machine)


def _batch(kind: str, num: int, seed: int) -> SamplingBatch:
    draws, positions = [], [100 * seed + row for row in range(num)]
    for row in range(num):
        p = replace(PLAIN, seed=seed * 1000 + row, **KINDS[kind])
        state = PenaltyState(p, [1, 2, 3, row, 3, 3], 2, [])
        adjustment = state.adjustment() if PenaltyState.is_needed(p) else None
        draws.append(Draw(p, row % 3, adjustment))
    return SamplingBatch(draws, positions, range(num), (), range(num), range(num))


def _drawing(machine: Machine, vocab_size: int) -> DeviceDrawing:
    head: Any = Head(vocab_size)
    return DeviceDrawing(head, machine.ops, torch.device(machine.device))


def _draws(machine: Machine, kind: str) -> Passed:
    num_rows, vocab_size = machine.pick(64, 3), machine.pick(151_936, 300)
    drawing = _drawing(machine, vocab_size)
    inputs = StepInputs(torch.device(machine.device))
    generator, num_draws = torch.Generator().manual_seed(1), 0
    for seed in range(machine.pick(30, 1)):
        logits = torch.randn(num_rows, vocab_size, generator=generator) * (1 + seed % 5)
        logits[:, ::97] = float("-inf")
        batch = _batch(kind, num_rows, seed)
        placed = inputs.place(drawing.arrays(batch))
        (found,) = drawing.draw(logits.to(machine.device), batch, placed, ())
        pairs = zip(batch.draws, logits, strict=True)
        adjusted = [d.adjustment.applied(x) if d.adjustment else x for d, x in pairs]
        batch.columns["temperature"].clip(min=1e-30, out=batch.columns["temperature"])
        left = filtered_weights(torch.stack(adjusted), batch, torch.arange(num_rows))
        if wrong := int((left.gather(1, found.cpu()[:, None]) == 0).sum()):
            raise Failed(f"{wrong} of {num_rows} tokens are filtered, after {num_draws} right ones")
        num_draws += num_rows
    return Passed(f"{num_draws} draws of {vocab_size} tokens, all of which the filters leave")


def _speed(machine: Machine) -> Passed:
    num_rows, vocab_size = machine.pick(64, 2), machine.pick(151_936, 300)
    drawing = _drawing(machine, vocab_size)
    logits = 3 * torch.randn(num_rows, vocab_size, device=machine.device)
    seconds: dict[str, float] = {}
    for kind in ("argmaxes", "temperatures", "all filters"):
        batch = _batch(kind, num_rows, 1)
        placed = StepInputs(torch.device(machine.device)).place(drawing.arrays(batch))
        seconds[kind] = machine.seconds(partial(drawing.draw, logits, batch, placed, ()))
    wanted = f"at most {MAX_SECONDS * 1e6:,.0f} us"
    is_fast = seconds["all filters"] <= MAX_SECONDS
    return machine.judge(is_fast, wanted, f"{num_rows} draws: {micros(seconds)}", seconds)
