"""The GPU of a thread. CUDA's current device belongs to a thread and is device 0 in a new one."""

import torch


def use_device(device: torch.device) -> None:
    """Make `device` the calling thread's current GPU; nothing if it is no GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
