"""Times a whole decode step of the model, on an arena made for it."""

import time
from dataclasses import dataclass

import torch

import kvops
from services.engine.batch import Draw, Row
from services.engine.models import Model
from services.engine.runner import Runner
from services.protocol.ticket import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
_KV_BYTES = 1 << 30
_MIN_S = 0.4
_LEAST = 3


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step of `num_rows` sequences, each `context` tokens long."""

    num_rows: int
    context: int

    def fitting(self, bytes_per_token: int) -> "DecodeStep":
        """The same step with only as many rows as fit in the arena for timing, at least one."""
        room = _KV_BYTES // (self.context * bytes_per_token)
        return DecodeStep(max(1, min(self.num_rows, room)), self.context)


def time_step(model: Model, step: DecodeStep, block_size: int) -> float:
    """Seconds of the fastest of several steps. The arena is all zeros, which does not change the
    time."""
    config = model.config
    blocks_a_row = -(-step.context // block_size)
    block = (config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    kv = torch.zeros((step.num_rows * blocks_a_row, *block), dtype=model.dtype)
    runner = Runner(model, kv, block_size, kvops.backend("reference"))  # no blocks are copied
    rows = [
        Row([0], step.context - 1, range(first, first + blocks_a_row), draws=(Draw(_GREEDY, 0),))
        for first in range(0, step.num_rows * blocks_a_row, blocks_a_row)
    ]
    best, num_steps, until = float("inf"), 0, time.perf_counter() + _MIN_S
    while num_steps < _LEAST or time.perf_counter() < until:
        began = time.perf_counter()
        runner.launch(rows).result()  # returns when the tokens are drawn
        best = min(best, time.perf_counter() - began)
        num_steps += 1
    return best
