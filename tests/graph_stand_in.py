"""A stand-in for a CUDA graph: it records the launches of a capture, and replays them on the same
tensors. So a launch that was recorded with another step's memory or numbers computes that step.

A kernel is one launch (`launched`), whatever it does inside; outside of kernels each operation of
PyTorch is one. As in a capture on a GPU, nothing outside of kernels may read a tensor on the host.
"""

import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Launch = tuple[Callable[[], Any], list[Tensor]]

_READS_ON_THE_HOST = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each thread records by itself."""

    recording = threading.local()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.num_tokens = 0
        self.num_replays = 0

    def capture(self, launch: Callable[[], Tensor]) -> Tensor:
        RecordedGraph.recording.graph = self
        try:
            with self:
                states = launch()
        finally:
            del RecordedGraph.recording.graph
        self.num_tokens = len(states)
        return states

    def replay(self) -> None:
        self.num_replays += 1
        for call, results in self.launches:
            for new, old in zip(_tensors(call()), results, strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func not in _READS_ON_THE_HOST, f"{func} in a capture"
        return self.record(lambda: func(*args, **(kwargs or {})))

    def record(self, call: Callable[[], Any]) -> Any:
        result = call()
        self.launches.append((call, _tensors(result)))
        return result


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a kernel: a recording graph counts it as one launch."""

    @wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        graph: RecordedGraph | None = getattr(RecordedGraph.recording, "graph", None)
        with _disable_current_modes():
            if graph is None:
                return function(*args, **kwargs)
            return graph.record(lambda: function(*args, **kwargs))

    return launch
