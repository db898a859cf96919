"""Divides a GPU's memory between the workers' weights and activations and the pool.

    total x utilization = shared weights
                          + num_workers x (weights + activations + graphs + draft + other)
                          + pool

`utilization` is vLLM's gpu_memory_utilization: the share of the GPU that this deployment may use,
whatever other programs use. The workers share one copy of the weights where they can; then
`weights` is what each worker keeps beside that copy. `graphs` are CUDA graphs with their memory.
`other` is the memory that a process takes beyond PyTorch's tensors, for its CUDA context, kernels
and workspaces.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from services.engine.device.graphs import Graph
from services.engine.device.threads import use_device
from services.engine.pool import KVPool
from services.engine.runner import Runner
from services.pool.layout import PoolLayout
from services.pool.sizing import format_size
from services.runtime.errors import StartupError

if TYPE_CHECKING:  # bench.gpu computes without its imports
    from services.engine.weights.placement import SharedWeights


@dataclass(frozen=True, slots=True)
class GpuMemoryPlan:
    """The parts, in bytes; `weights`, `activations`, `graphs` and `other` of one worker."""

    total: int
    utilization: float
    num_workers: int
    weights: int
    activations: int
    other: int
    graphs: int = 0
    shared_weights: int = 0
    draft: int = 0
    """The weights and KV of a draft model, with its graphs and attention."""

    @property
    def pool(self) -> int:
        """Raises StartupError if nothing is left for the pool."""
        each = self.weights + self.activations + self.graphs + self.other + self.draft
        taken = self.shared_weights + self.num_workers * each
        pool = int(self.total * self.utilization) - taken
        if pool <= 0:
            raise StartupError(
                f"{self.utilization:g} of the GPU's {format_size(self.total)} leaves no memory for "
                f"the pool: {self.num_workers} workers take {format_size(taken)}, together "
                f"{format_size(self.shared_weights)} for shared weights, and each "
                f"{format_size(self.weights)} for weights, {format_size(self.activations)} for "
                f"activations, {format_size(self.graphs)} for CUDA graphs, "
                f"{format_size(self.draft)} for a draft model and "
                f"{format_size(self.other)} for its CUDA context and kernels; "
                "raise gpu_memory_utilization, or lower max_num_batched_tokens or the number of "
                "workers"
            )
        return pool

    def fields(self, block_bytes: int) -> dict[str, int | float]:
        """The sum, for the log."""
        return {**asdict(self), "pool": self.pool, "num_blocks": self.pool // block_bytes}


class MemoryMeter(Protocol):
    """The memory of a GPU, as this process sees it, in bytes."""

    def total(self) -> int: ...

    def tensors(self) -> int:
        """The present memory of PyTorch's tensors."""
        ...

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """The most that tensors took since `reset_peak`."""
        ...

    def used(self) -> int:
        """All that this process has, but for memory of freed tensors that PyTorch keeps."""
        ...

    def other(self) -> int:
        """The bytes of this process beyond those that PyTorch has reserved for tensors."""
        ...


class CudaMeter:
    """By PyTorch, and by NVML for what PyTorch does not know."""

    def __init__(self, device: torch.device, gpu_uuid: str) -> None:
        self._device = device
        self._uuid = gpu_uuid

    def total(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def tensors(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def other(self) -> int:
        """Raises StartupError as `used` does."""
        return max(0, self.used() - torch.cuda.memory_reserved(self._device))

    def used(self) -> int:
        """Raises StartupError if NVML does not tell the number. Other workers load at the same
        time, so the change of the GPU's free memory does not tell it either."""
        torch.cuda.empty_cache()  # as the capture of a graph does
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            used = {
                process.pid: process.usedGpuMemory
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device)
            }
        except ModuleNotFoundError as error:
            raise StartupError(
                "gpu_memory_utilization needs the package nvidia-ml-py (the extra "
                "quire-serve[cuda]), or set pool_memory"
            ) from error
        except pynvml.NVMLError as error:
            raise StartupError(f"NVML does not tell this process's memory: {error}") from error
        own = used.get(os.getpid())
        if own is None:
            raise StartupError(
                f"NVML does not list process {os.getpid()} on {self._uuid}, so its memory is not "
                "known: set pool_memory, or give a container the host's PID namespace (pid: host)"
            )
        return int(own)


def profile(
    meter: MemoryMeter,
    device: torch.device,
    new_runner: Callable[[Tensor], Runner],
    layout: PoolLayout,
    *,
    num_tokens: int,
    num_rows: int,
    num_workers: int,
    utilization: float,
    shared: "SharedWeights | None" = None,
    graph_rows: int = 0,
    new_graph: Callable[[], Graph] | None = None,
    draft_bytes: int = 0,
    max_lora_rank: int = 0,
) -> GpuMemoryPlan:
    """Measure a worker's memory by its largest step, `num_tokens` new tokens of `num_rows`
    sequences, and by recording the graphs of steps, for decode steps of up to `graph_rows` rows (0
    records none). `new_runner` makes a runner on an arena of one block, into which nothing is
    written. With several ranks this is the first one's plan; the steps run on all of them."""
    use_device(device)
    weights = meter.tensors()
    pool = KVPool.private(layout, 1, str(device))
    before = meter.tensors()
    meter.reset_peak()
    runner = new_runner(pool.kv)
    runner.run_largest_step(num_tokens, num_rows)
    activations, other, graphs = meter.peak() - before, meter.other(), 0
    if graph_rows:  # the temporaries of graphs are in memory that the peak does not show
        used = meter.used()
        runner.capture_graphs(graph_rows, num_tokens, new_graph, max_lora_rank)
        graphs = max(0, meter.used() - used)
    return GpuMemoryPlan(
        meter.total(),
        utilization,
        num_workers,
        weights,
        activations,
        other=max(0, other - (shared.counted if shared else 0)),
        graphs=graphs,
        shared_weights=shared.num_bytes if shared else 0,
        draft=draft_bytes,
    )
