"""Times decode attention on this machine with each block size."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from advisor.step import DecodeStep
from kvops.ops import Backend
from services.common.text.model_config import ModelConfig

_ARENA_BYTES = 256 << 20  # more than the CPU's caches hold
_ROUNDS = 5
_MIN_S = 0.04  # for one block size in one round


def time_attention(
    config: ModelConfig,
    step: DecodeStep,
    block_sizes: Sequence[int],
    ops: Backend,
    dtype: torch.dtype,
) -> dict[int, float]:
    """Seconds of one layer, by block size. ValueError: the backend cannot read blocks of a size."""
    inputs = _AttentionInput(config, step, max(block_sizes), dtype)
    calls = {size: inputs.layers(ops, size) for size in block_sizes}
    best = dict.fromkeys(block_sizes, float("inf"))
    for _ in range(_ROUNDS):  # sizes in turn, so that other load on the machine affects all alike
        for size, layers in calls.items():
            best[size] = min(best[size], inputs.seconds(layers))
    return best


class _AttentionInput:
    """One arena with as many of the model's layers as fit in _ARENA_BYTES, at least one. It is
    viewed with blocks of each size in turn."""

    def __init__(
        self, config: ModelConfig, step: DecodeStep, largest: int, dtype: torch.dtype
    ) -> None:
        self._config, self._step = config, step
        slots_a_row = -(-step.context // largest) * largest
        num_values = step.num_rows * slots_a_row * 2 * config.num_kv_heads * config.head_dim
        room = _ARENA_BYTES // (num_values * dtype.itemsize)
        self._num_layers = max(1, min(config.num_layers, room))
        num_values *= self._num_layers
        noise = torch.randn(1 << 20).to(dtype)
        self._arena = noise.repeat(-(-num_values // len(noise)))[:num_values]
        heads = config.num_heads, config.head_dim
        self._q = torch.randn(step.num_rows, *heads).to(dtype)
        self._cu_query_lens = torch.arange(step.num_rows + 1, dtype=torch.int32)
        self._context_lens = torch.full_like(self._cu_query_lens[1:], step.context)

    def layers(self, ops: Backend, block_size: int) -> list[Callable[[], Tensor]]:
        """One attention call per layer; the blocks of each row are scattered over the arena."""
        config = self._config
        block = (self._num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        kv = self._arena.view(-1, *block)
        scattered = torch.randperm(len(kv)).to(torch.int32)
        tables = scattered.view(self._step.num_rows, -1)
        where = (tables, self._cu_query_lens, self._context_lens)
        scale = config.head_dim**-0.5

        def of(layer: int) -> Callable[[], Tensor]:
            kv_layer, window = kv[:, layer], config.windows[layer]
            return lambda: ops.paged_attention(
                self._q, kv_layer, *where, scale, window, max_query_len=1
            )

        return [of(layer) for layer in range(self._num_layers)]

    def seconds(self, layers: Sequence[Callable[[], Tensor]]) -> float:
        """Mean time of a layer in the fastest pass over all layers."""
        best, until = float("inf"), time.perf_counter() + _MIN_S
        while True:
            began = time.perf_counter()
            for attend in layers:
                attend()
            ended = time.perf_counter()
            best = min(best, (ended - began) / len(layers))
            if ended > until:
                return best
