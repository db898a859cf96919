"""Makes the backend with a given name, and never falls back to another one."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

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
    if isa is not None and name != "cpu":
        raise BackendUnavailable(f"backend {name!r} has no instruction set to choose: {isa}")
    try:
        return Backend(_cpu(isa) if name == "cpu" else _FACTORIES[name]())
    except ValueError as error:
        raise BackendUnavailable(str(error)) from error
    except ImportError as error:
        if error.name not in _PACKAGES:
            raise
        if isinstance(error, ModuleNotFoundError):
            raise BackendUnavailable(f"backend {name!r} needs {_PACKAGES[error.name]}") from error
        raise BackendUnavailable(
            f"backend {name!r} cannot import {error.name}, which may be built for another version "
            f"of PyTorch than {torch.__version__}: {error}"
        ) from error


# These functions import optional packages, so that only their backends need them.


def _cpu(isa: str | None = None) -> Kernels:
    from kvops.cpu import CpuKernels

    return CpuKernels(isa)


def _triton() -> Kernels:
    import triton  # type: ignore[import-untyped]

    from kvops.triton import TritonKernels

    if not triton.knobs.runtime.interpret:
        _need_gpu("triton")
    return TritonKernels()


def _flash() -> Kernels:
    """By the package flash-attn where it is installed, else by PyTorch."""
    if find_spec("flash_attn"):
        from kvops.attention.flash_package import FlashPackageKernels

        _need_gpu("flash")
        return FlashPackageKernels()
    from kvops.attention.flash import FlashKernels

    _need_gpu("flash")
    return FlashKernels()


def _flashinfer() -> Kernels:
    from kvops.attention.flashinfer import FlashInferKernels

    _need_gpu("flashinfer")
    return FlashInferKernels()


def _triton_reference() -> Kernels:
    from kvops.triton import ReferenceAttentionKernels

    _triton()  # raises where it cannot run
    return ReferenceAttentionKernels()


_CAPABILITY = (8, 0)
"""The least compute capability: the first with bf16 matrix products and asynchronous copies."""


def _need_gpu(name: str) -> None:
    wanted = f"backend {name!r} needs a CUDA device"
    if torch.version.cuda is None:
        raise BackendUnavailable(f"{wanted}; PyTorch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"{wanted}; PyTorch {torch.__version__} sees none")
    found = torch.cuda.get_device_capability()
    if found < _CAPABILITY:
        raise BackendUnavailable(
            f"{wanted} of compute capability {_text(_CAPABILITY)} or more; "
            f"{torch.cuda.get_device_name()} has {_text(found)}"
        )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


_FACTORIES: dict[str, Callable[[], Kernels]] = {
    "reference": ReferenceKernels,
    "cpu": _cpu,
    "triton": _triton,
    "flash": _flash,
    "flashinfer": _flashinfer,
    "triton-reference": _triton_reference,
}

_EXTRA = "which is not installed: see the extra quire-serve[cuda]"
_FLASH_EXTRA = "which is not installed: see the extra quire-serve[flash]"
_PACKAGES = {
    "kvops._native": "the C++ kernels, with which this installation was not compiled",
    "triton": f"the package triton, {_EXTRA}",
    "flash_attn_2_cuda": f"the compiled part of flash-attn, {_FLASH_EXTRA}",
    "flashinfer": "the package flashinfer-python, which is not installed: see the extra "
    "quire-serve[flashinfer]",
}

BACKENDS = tuple(_FACTORIES)
