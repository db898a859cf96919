"""The index tensors of a step, in one buffer that reaches the device in one copy.

    host     | token_ids | positions | slots | sources | tables | cu_query_lens | context_lens | ..
    device   |   the same bytes: views of one static allocation, at the same offsets

On a GPU the host's buffer is pinned, so that the copy does not wait for the steps before. There are
two of them, used in turn: while the device copies one, the next step fills the other.
On a CPU the tensors are views of the host's buffer, and nothing is copied.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.device.event import DeviceEvent, PassedEvent, record_event

Indices = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 16


def block_pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Pairs of block ids as [any, 2] int64 on the device. The host does not wait for the steps
    before, as it would for a copy from memory that is not pinned."""
    places = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    if device.type == "cuda":
        places = places.pin_memory()
    return places.to(device, non_blocking=True)


def one_token_rows(arrays: Mapping[str, Indices]) -> dict[str, Indices]:
    """The arrays of a step with a row for each token. A step stores the KV of all its tokens before
    attention reads them, so each token sees the tokens before it, in the bits of a decode step."""
    begins = arrays["cu_query_lens"]
    row_of_token = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    return {
        **arrays,
        "block_tables": arrays["block_tables"][row_of_token],
        "cu_query_lens": np.arange(len(row_of_token) + 1, dtype=np.int32),
        "context_lens": (arrays["positions"] + 1).astype(np.int32),
    }


@dataclass(slots=True)
class _HostBuffer:
    """Bytes on the host. They may change again once `copied` has passed."""

    memory: Tensor
    copied: DeviceEvent


class StepInputs:
    """The buffers of one runner. They grow to the largest step. `is_copied` tells whether the
    tensors are on a device; otherwise they are the arrays."""

    def __init__(self, device: torch.device) -> None:
        self.is_copied = device.type != "cpu"
        self._device = device
        self._hosts = deque(_HostBuffer(torch.empty(0), PassedEvent()) for _ in range(2))
        self._static = torch.empty(0, dtype=torch.uint8, device=device)

    def place(self, arrays: Mapping[str, Indices]) -> dict[str, Tensor]:
        """The arrays as tensors on the device, for the step that is launched next: the next call
        changes them, after that step in the device's order."""
        if not self.is_copied:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        begins, size = {}, 0
        for name, array in arrays.items():
            begins[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = self._free_host(size)
        for name, array in arrays.items():
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            host.memory[begins[name] : begins[name] + array.nbytes] = flat
        self._static[:size].copy_(host.memory[:size], non_blocking=True)
        host.copied = record_event(self._device)
        return {name: self._view(begins[name], array) for name, array in arrays.items()}

    def _view(self, begin: int, array: Indices) -> Tensor:
        dtype = torch.from_numpy(array).dtype
        return self._static[begin : begin + array.nbytes].view(dtype).view(array.shape)

    def _free_host(self, size: int) -> _HostBuffer:
        """The buffer that was used longest ago, with room for `size` bytes, as the device has."""
        if len(self._static) < size:
            size = 1 << (size - 1).bit_length()
            self._static = torch.empty(size, dtype=torch.uint8, device=self._device)
        host = self._hosts[0]
        self._hosts.rotate(-1)
        host.copied.synchronize()
        if len(host.memory) < len(self._static):
            is_pinned = self._device.type == "cuda"
            host.memory = torch.empty(len(self._static), dtype=torch.uint8, pin_memory=is_pinned)
        return host
