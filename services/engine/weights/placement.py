"""Where the tensors of a composed model are: in memory of this process, or packed into one
allocation of a GPU that all workers on it map (`services.pool.kept_weights`).

    | length of the text | text: dtypes and shapes, in order | pad | tensor | pad | tensor | ...

A loader asks for its tensors in an order that depends on the checkpoint alone. So a tensor has no
name here: it is the next one.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvops.cuda.vmm import Driver, DriverError, SharedMemory, allocation_bytes
from services.pool.keeper import KeptMemory
from services.pool.kept_weights import WeightsClaim, WeightsKey
from services.runtime.errors import StartupError

LAYOUT_VERSION = 2
_ALIGNMENT = 256  # bytes, more than any kernel asks for
_LENGTH_BYTES = 8

Parts = Callable[[], Sequence[Tensor]]
M = TypeVar("M")


class Placement(Protocol):
    def __call__(self, parts: Parts, like: Tensor | None = None) -> Tensor:
        """The next tensor, on the model's device: the parts, one after another, in the model's
        dtype or as `like`, a tensor without values. `parts` is not called where the values are
        there already, nor for their shapes if there is `like`."""
        ...


def private(device: str, dtype: torch.dtype) -> Placement:
    """Each tensor in memory of its own."""

    def place(parts: Parts, like: Tensor | None = None) -> Tensor:
        wanted = dtype if like is None else like.dtype
        placed = [part.to(device, wanted) for part in parts()]
        return placed[0] if len(placed) == 1 else torch.cat(placed)

    return place


class SharedWeights:
    """The one copy of the weights on a GPU, which all workers of the GPU read."""

    def __init__(
        self,
        driver: Driver,
        root: Path,
        progress: Callable[[], None],
        measure: Callable[[], int] = lambda: 0,
    ) -> None:
        """The keeper is at `root`, the pools' directory. `measure` returns the bytes of this
        process on the device that are no tensors of PyTorch."""
        self._driver, self._root = driver, root
        self._measure, self._progress = measure, progress
        self.num_bytes = 0
        """The size of the weights' allocation."""
        self.counted = 0
        """The part of `num_bytes` that the driver counts as memory of this process."""
        self.kept: KeptMemory | None = None

    def load(self, name: str, dtype: torch.dtype, load: Callable[[Placement], M]) -> M:
        """The result of `load` for a placement, with all tensors in the shared memory `name`, read
        only. The first worker fills it. Raises StartupError without memory or without a keeper."""
        key = WeightsKey(f"{name}-{dtype}-{LAYOUT_VERSION}", self._driver.uuid)
        with ExitStack() as undo:
            claim = WeightsClaim(self._root, key, self._progress)
            undo.callback(claim.close)
            try:
                if claim.found is None:
                    with closing(self._filled(dtype, load)) as made:
                        kept = claim.seal(made.fd, made.num_bytes)
                else:
                    kept = claim.take()
                before = self._measure()
                self.num_bytes = claim.num_bytes
                memory = SharedMemory.open(
                    self._driver, os.dup(kept.fd), self.num_bytes, writable=False
                )
                self.counted = max(0, self._measure() - before)
            except DriverError as error:
                raise StartupError(f"no memory for shared weights: {error}") from error
            model = load(_Packed(memory.tensor()).take)
            undo.pop_all()
        self.kept = kept
        return model

    def _filled(self, dtype: torch.dtype, load: Callable[[Placement], M]) -> SharedMemory:
        shapes = _Shapes(dtype)
        load(shapes.record)
        num_bytes = allocation_bytes(self._driver, shapes.num_bytes)
        memory = SharedMemory.create(self._driver, num_bytes)
        try:
            values = memory.tensor()
            values[: len(shapes.head)] = torch.from_numpy(
                np.frombuffer(shapes.head, np.uint8).copy()
            )
            load(_Packed(values).fill)
            if values.is_cuda:
                torch.cuda.synchronize(values.device)
        except BaseException:
            memory.close()
            raise
        return memory


class _Shapes:
    """Records the dtypes and shapes of all tensors, without their values."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._placed: list[Tensor] = []

    def record(self, parts: Parts, like: Tensor | None = None) -> Tensor:
        if like is None:
            joined = torch.cat([torch.empty(part.shape, device="meta") for part in parts()])
            like = joined.to(self._dtype)
        self._placed.append(like)
        return like

    @property
    def head(self) -> bytes:
        names = [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in self._placed]
        text = json.dumps(names).encode()
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @property
    def num_bytes(self) -> int:
        sizes = (_padded(one.nbytes) for one in self._placed)
        return _padded(len(self.head)) + sum(sizes)


class _Packed:
    """Takes the tensors of packed memory one after another, as views."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        length = int.from_bytes(bytes(memory[:_LENGTH_BYTES].tolist()), "little")
        end = _LENGTH_BYTES + length
        self._shapes = iter(json.loads(bytes(memory[_LENGTH_BYTES:end].tolist())))
        self._begin = _padded(end)

    def take(self, parts: Parts, like: Tensor | None = None) -> Tensor:
        name, shape = next(self._shapes)
        dtype: torch.dtype = getattr(torch, name)
        end = self._begin + math.prod(shape) * dtype.itemsize
        view = self._memory[self._begin : end].view(dtype).view(shape)
        self._begin = _padded(end)
        return view

    def fill(self, parts: Parts, like: Tensor | None = None) -> Tensor:
        placed = self.take(parts, like)
        begin = 0
        for part in parts():
            placed[begin : begin + len(part)] = part
            begin += len(part)
        return placed


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
