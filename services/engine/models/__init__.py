"""Models: decoders of the families that Quire serves, loaded from Hugging Face checkpoints."""

from services.engine.models.load import load_model
from services.engine.models.model import Batch, Model

__all__ = ["Batch", "Model", "load_model"]
