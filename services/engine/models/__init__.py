"""Models: decoders of the families that Quire serves, loaded from Hugging Face checkpoints."""

from typing import TYPE_CHECKING, Any

from services.engine.models.model import Batch, Model

if TYPE_CHECKING:
    from services.engine.models.load import load_model

__all__ = ["Batch", "Model", "load_model"]


def __getattr__(name: str) -> Any:
    """Import `load_model` when it is first used: it needs the packages that read checkpoints and
    the C++ module, which a machine that only checks GPU kernels may lack."""
    if name == "load_model":
        from services.engine.models.load import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
