"""Decides how linears compute, from what the checkpoint stores and from the settings."""

from quire.choices import Quantize
from services.model.config.quantization import (
    FLOAT_KINDS,
    Quantization,
    StoredKind,
    StoredQuantization,
)


def kind_to_make(quantize: Quantize) -> Quantization | None:
    """The kind to which linears in floating point are quantized; None if they are not."""
    return None if quantize == "auto" or quantize == "none" else quantize


def computed_kind(
    stored: StoredQuantization | None, dtype: str, quantize: Quantize, kernels: str
) -> StoredKind | Quantization | None:
    """The kind with which quantized linears compute; None if they compute in floating point.

    Stored quantized weights keep their kind, unless `quantize` is none or `dtype` is float32, in
    which no quantized kernel computes: then they are dequantized. Weights in fp8 and MXFP4 are also
    dequantized if `kernels` are the CPU's, or if `quantize` names another kind.
    """
    kind = stored.kind if stored else None
    if kind in FLOAT_KINDS and (kernels == "cpu" or kind_to_make(quantize)):
        kind = None
    if quantize == "none" or (kind and dtype == "float32"):
        return None
    return kind or kind_to_make(quantize)


def is_dequantized(
    stored: StoredQuantization | None, dtype: str, quantize: Quantize, kernels: str
) -> bool:
    """Whether linears that the checkpoint has quantized compute in floating point."""
    return bool(stored and stored.kind) and computed_kind(stored, dtype, quantize, kernels) is None
