"""Decoders of the families that Quire serves, from Hugging Face checkpoints."""

from services.engine.models.decoder import Batch, Model
from services.engine.models.load import load_model

__all__ = ["Batch", "Model", "load_model"]
