"""Loads a checkpoint's tensors from memory-mapped safetensors files, one file or several.

A tensor that is not converted is a view of the mapped file: it costs no private memory, and all
workers of a host share its pages.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.checkpoint.weights import checked_weights, weight_files
from services.common.errors import StartupError

_DIGESTED_BYTES = 1 << 20


def load_weights(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    ignored: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Every tensor named in `shapes`, converted to `dtype`; None: with the dtype of its file.

    Raises StartupError if a file cannot be read, or as `checked_weights` does.
    """
    weights: dict[str, Tensor] = {}
    for path, names in checked_weights(directory, shapes, ignored).items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    tensor = file.get_tensor(name)
                    weights[name] = tensor if dtype is None else tensor.to(dtype)
        except (SafetensorError, OSError) as exc:
            raise StartupError(f"{path}: not a readable safetensors file: {exc}") from exc
    return weights


def weights_digest(directory: Path, progress: Callable[[], None] = lambda: None) -> str:
    """xxh3-128 over every byte of the weight files, in hexadecimal. The disk limits its speed, or
    memory (20 GB/s) if the files are in the page cache. StartupError: a file cannot be read."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(_DIGESTED_BYTES))
    for path in weight_files(directory):
        try:
            # The length comes first: otherwise bytes that move between files change nothing.
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb", buffering=0) as file:
                while num_bytes := file.readinto(piece):
                    digest.update(piece[:num_bytes])
                    progress()
        except OSError as exc:
            raise StartupError(f"{path}: {exc.strerror}") from exc
    return digest.hexdigest()
