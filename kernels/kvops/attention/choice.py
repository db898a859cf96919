"""Chooses who computes attention on a GPU, once, at start.

auto         Hopper, Blackwell: flashinfer, flash, triton; other GPUs: flash, triton; the first
             that is installed and serves the model's shape
another      that one, or an error
"""

import torch

from kvops.backend import BackendUnavailable, backend
from kvops.ops import Backend
from kvops.step import AttentionShape

_BACKENDS = {
    "flashinfer": "flashinfer",
    "flash": "flash",
    "triton": "triton",
    "reference": "triton-reference",
}
ATTENTION = ("auto", *_BACKENDS)
_HOPPER = (9, 0)


def choose_attention(attention: str, shape: AttentionShape) -> tuple[Backend, str]:
    """The backend with the attention that `attention`, one of `ATTENTION`, names, and the reason
    for it. Raises BackendUnavailable if it cannot run here, and ValueError if it does not serve the
    shape."""
    if attention != "auto":
        if attention not in _BACKENDS:
            raise ValueError(f"no attention {attention!r}; there are {', '.join(ATTENTION)}")
        return _serving(attention, shape), "asked for"
    if backend("triton").device == "cpu":  # interpreted
        return _serving("triton", shape), "no GPU"
    capability = torch.cuda.get_device_capability()
    reasons = [f"capability {capability[0]}.{capability[1]}"]
    candidates = ("flashinfer", "flash") if capability >= _HOPPER else ("flash",)
    for name in candidates:
        try:
            return _serving(name, shape), "; ".join(reasons)
        except (BackendUnavailable, ValueError) as error:
            reasons.append(str(error))
    return _serving("triton", shape), "; ".join(reasons)


def _serving(attention: str, shape: AttentionShape) -> Backend:
    found = backend(_BACKENDS[attention])
    found.check_attention(shape)
    return found
