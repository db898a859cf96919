"""A stand-in for a CUDA stream of copies, which copies nothing until a caller waits for it. Then it
copies all that is queued."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class LateStream:
    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.most_queued = 0
        self._queue: deque[tuple[Tensor, Tensor]] = deque()
        self._num_done = 0

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.full(shape, float("nan"), dtype=dtype))
        return self.buffers[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Only the host's side of a copy uses pinned buffers."""
        pinned = [
            any(b.data_ptr() <= t.data_ptr() < b.data_ptr() + b.nbytes for b in self.buffers)
            for t in (target, source)
        ]
        assert sum(pinned) == 1
        self._queue.append((target, source))
        self.most_queued = max(self.most_queued, len(self._queue))

    def mark(self) -> Callable[[], object]:
        number = self._num_done + len(self._queue)

        def wait() -> None:
            while self._num_done < number:
                target, source = self._queue.popleft()
                target.copy_(source)
                self._num_done += 1

        return wait

    @property
    def is_idle(self) -> bool:
        return not self._queue
