"""Sums of small messages by one kernel, in which each rank reads the terms of all ranks.

The GPUs of a host that reach each other's memory map a buffer of each rank (PyTorch's symmetric
memory). NCCL's all-reduce takes several exchanges, which cost more than the bytes of a decode step.

Not run on hardware.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 256 * 1024
"""The largest message. A rank reads the messages of all other ranks, where an all-reduce moves
about two messages, whatever the number of ranks."""
GROUP = "quire-ranks"


class OneShot:
    """A rank's buffer that all ranks map. A sum is launched on the current stream, and becomes part
    of a CUDA graph that is captured there."""

    def __init__(self, buffer: Tensor) -> None:
        """`buffer` has MOST_BYTES, uint8."""
        self._buffer = buffer

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel sums such tensors: small ones, a multiple of 16 bytes."""
        return 0 < x.nbytes <= MOST_BYTES and x.nbytes % 16 == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, with the same bits on all ranks."""
        buffer = self._buffer[: x.nbytes].view(x.dtype)
        terms = x.contiguous().view(-1)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, terms, "sum", GROUP)
        return total.view(x.shape)


def between_gpus(store: Any, rank: int, num_ranks: int, device: torch.device) -> OneShot | None:
    """Map the buffers of all ranks, which all call it with the same `store`. If one of them cannot,
    all ranks get None, and NCCL sums all messages: where GPUs do not reach each other's memory, and
    after a reload, since PyTorch connects a process with one set of ranks only."""
    # Imported here: CPUs have no use for the first, which takes a second, and the checks of a GPU
    # run where nothing but PyTorch and Triton is installed.
    from torch.distributed import _symmetric_memory

    from services.runtime.logging import get_logger

    symmetric: Any = _symmetric_memory
    within: Any = dist.PrefixStore("one-shot", store)  # type: ignore[attr-defined]

    def allocated() -> Any:
        symmetric._SymmetricMemory.set_group_info(GROUP, rank, num_ranks, within)
        return symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)

    def at_all_ranks(step: str, take: Callable[[], Any]) -> Any:
        """The result of the step; None if the step fails at any rank."""
        found = None
        try:
            found = take()
        except RuntimeError as error:
            get_logger(__name__).warning(
                "no_symmetric_memory", reason=str(error).partition("\n")[0]
            )
        within.set(f"{step}/{rank}", "failed" if found is None else "done")
        answers = [within.get(f"{step}/{each}") for each in range(num_ranks)]
        return found if set(answers) == {b"done"} else None

    # No rank waits in `rendezvous` for a rank that has failed before.
    buffer = at_all_ranks("allocate", allocated)
    if buffer is None:
        return None
    is_mapped = at_all_ranks("map", lambda: symmetric.rendezvous(buffer, GROUP))
    return None if is_mapped is None else OneShot(buffer)
