"""Makes the backend with a given name, and never falls back to another one."""

from collections.abc import Callable

import torch

from kvops.cpu import CpuKernels
from kvops.kernels import Kernels
from kvops.ops import Backend
from kvops.reference import ReferenceKernels


class BackendUnavailable(Exception):
    """There is no such backend, or it cannot run here; the text says what is missing."""


def backend(name: str, isa: str | None = None) -> Backend:
    """Return the backend called `name`, one of `BACKENDS`. `isa` is the instruction set of the
    native kernels; by default it is the best one of this CPU. BackendUnavailable."""
    if name not in _FACTORIES:
        raise BackendUnavailable(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    try:
        if name == "cpu":
            return Backend(CpuKernels(isa))
        if isa is not None:
            raise BackendUnavailable(f"backend {name!r} has no instruction set to choose: {isa}")
        return Backend(_FACTORIES[name]())
    except ValueError as error:
        raise BackendUnavailable(str(error)) from error
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise BackendUnavailable(
            f"backend {name!r} needs the package {_PACKAGES[error.name]}, which is not installed: "
            "see the extra quire-serve[cuda]"
        ) from error


# These functions import optional packages, so that only their backends need them.


def _triton() -> Kernels:
    import triton  # type: ignore[import-untyped]

    from kvops.triton import TritonKernels

    if not triton.knobs.runtime.interpret:
        _need_gpu("triton")
    return TritonKernels()


def _flash() -> Kernels:
    from kvops.flash import FlashKernels

    _need_gpu("flash")
    return FlashKernels()


def _need_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"backend {name!r} needs a CUDA device; PyTorch {torch.__version__} sees none"
        )


_FACTORIES: dict[str, Callable[[], Kernels]] = {
    "reference": ReferenceKernels,
    "cpu": CpuKernels,
    "triton": _triton,
    "flash": _flash,
}
_PACKAGES = {"triton": "triton", "flash_attn": "flash-attn"}

BACKENDS = tuple(_FACTORIES)
