"""Copies blocks from one arena to another; the arenas may be on different devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

_BUFFER_BYTES = 32 << 20
"""Of each of the two staging buffers: a copy of this size runs at the full speed of PCIe."""


def copy_between(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of `source` to block `pairs[i, 1]` of `target`. A run of blocks that
    is contiguous in both arenas takes one copy."""
    for first, to, count in _runs(pairs.tolist()):
        target[to : to + count].copy_(source[first : first + count])


class CopyStream(Protocol):
    """A queue of copies that a GPU executes beside its kernels."""

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate page-locked memory of the host: only that is copied while the CPU goes on."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; one of the tensors is on the GPU, the other one in a buffer."""
        ...

    def mark(self) -> Callable[[], object]:
        """Return a function that waits for all copies queued so far."""
        ...


class CudaStream:
    """The `CopyStream` of the current GPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], object]:
        event: torch.cuda.Event = self._stream.record_event()
        return event.synchronize


class StagedCopies:
    """Copies blocks between a GPU's arena and one in the host's memory, beside the steps.

    The host's arena is not page-locked: it is a file that is allocated bit by bit. So the blocks go
    through two page-locked buffers: the GPU copies one while the CPU copies the other one. Both
    methods return when all blocks have arrived. A block on the GPU that is read must be complete:
    the step that wrote it has returned its tokens. For one thread at a time.
    """

    def __init__(self, stream: CopyStream, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._stream = stream
        self._buffer_bytes = buffer_bytes
        self._buffers: tuple[Tensor, ...] = ()

    def to_host(self, target: Tensor, source: Tensor, pairs: Tensor) -> None:
        """`source` is on the GPU; otherwise as `copy_between`."""

        def unload(buffer: Tensor, batch: list[list[int]], wait: Callable[[], object]) -> None:
            wait()
            for block, (_, to) in zip(buffer, batch, strict=False):
                target[to].copy_(block)

        waiting = None
        for buffer, batch in self._batches(source, pairs):
            for block, (first, _) in zip(buffer, batch, strict=False):
                self._stream.copy(block, source[first])
            if waiting:
                unload(*waiting)
            waiting = buffer, batch, self._stream.mark()
        if waiting:
            unload(*waiting)

    def to_gpu(self, target: Tensor, source: Tensor, pairs: Tensor) -> None:
        """`target` is on the GPU; otherwise as `copy_between`."""
        marks: list[Callable[[], object]] = []
        for buffer, batch in self._batches(source, pairs):
            if len(marks) > 1:
                marks[-2]()  # the buffer's last content is on the GPU
            for block, (first, _) in zip(buffer, batch, strict=False):
                block.copy_(source[first])
            for block, (_, to) in zip(buffer, batch, strict=False):
                self._stream.copy(target[to], block)
            marks.append(self._stream.mark())
        for mark in marks[-1:]:
            mark()

    def _batches(self, like: Tensor, pairs: Tensor) -> Iterator[tuple[Tensor, list[list[int]]]]:
        """Give the two buffers in turn, each with the pairs of the blocks that fit into it."""
        fitting = max(1, self._buffer_bytes // like[0].nbytes)
        wanted = (fitting, *like.shape[1:]), like.dtype
        if [(buffer.shape, buffer.dtype) for buffer in self._buffers] != [wanted] * 2:
            self._buffers = tuple(self._stream.buffer(*wanted) for _ in range(2))
        for number, begin in enumerate(range(0, len(pairs), fitting)):
            yield self._buffers[number % 2], pairs[begin : begin + fitting].tolist()


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Give contiguous runs as (first source, first target, number of blocks)."""
    begin = 0
    for end in range(1, len(pairs) + 1):
        block, to = pairs[begin]
        count = end - begin
        if end == len(pairs) or tuple(pairs[end]) != (block + count, to + count):
            yield block, to, count
            begin = end
