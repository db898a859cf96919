"""The choice of a backend: once, by name, and never another one than asked for."""

from collections.abc import Callable

from kvops.cpu import CpuKernels
from kvops.kernels import Kernels
from kvops.ops import Backend
from kvops.reference import ReferenceKernels

BACKENDS = ("reference", "cpu", "triton", "flash")

_AVAILABLE: dict[str, Callable[[], Kernels]] = {"reference": ReferenceKernels, "cpu": CpuKernels}


class BackendUnavailable(Exception):
    """No such backend, or it cannot run here; the text says what is missing."""


def backend(name: str) -> Backend:
    """The backend called `name`, one of `BACKENDS`. BackendUnavailable, with what is missing."""
    if name not in BACKENDS:
        raise BackendUnavailable(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    if name not in _AVAILABLE:
        raise BackendUnavailable(
            f"backend {name!r} needs CUDA kernels, which this version does not have yet; "
            f"it has {', '.join(_AVAILABLE)}"
        )
    return Backend(_AVAILABLE[name]())
