"""Decides how linears compute, from what the checkpoint stores and from the settings."""

from quire.choices import Quantize
from services.model.config.quantization import Quantization, StoredKind, StoredQuantization


def kind_to_make(quantize: Quantize) -> Quantization | None:
    """The kind to which linears in floating point are quantized; None: they are not."""
    return None if quantize == "auto" or quantize == "none" else quantize


def computed_kind(
    stored: StoredQuantization | None, dtype: str, quantize: Quantize
) -> StoredKind | Quantization | None:
    """The kind with which quantized linears compute; None: in floating point.

    Stored quantized weights keep their kind, unless `quantize` is none or `dtype` is float32, in
    which no quantized kernel computes: then they are dequantized.
    """
    kind = stored.kind if stored else None
    if quantize == "none" or (kind and dtype == "float32"):
        return None
    return kind or kind_to_make(quantize)


def is_dequantized(stored: StoredQuantization | None, dtype: str, quantize: Quantize) -> bool:
    """Whether linears that the checkpoint has quantized compute in floating point."""
    return bool(stored and stored.kind) and computed_kind(stored, dtype, quantize) is None
