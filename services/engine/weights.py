"""A checkpoint's tensors, memory-mapped from safetensors files, one or sharded with an index.

A tensor whose file already has the wanted dtype is a view of the mapped file: it costs no private
memory, and all workers of a host share its pages.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.errors import StartupError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DIGESTED_BYTES = 1 << 20

_LOADABLE = (torch.float32, torch.bfloat16, torch.float16)
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Old Llama checkpoints carry the rope's frequencies, which follow from the config."""


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted by name. StartupError: there are none, or the
    index is broken or names a file that is not there."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise StartupError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    return tuple(sorted({directory / name for name in _read_index(index).values()}))


def load_weights(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    ignored: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Every tensor of `shapes`, as `dtype`; None: as each is in its file.

    `ignored` are names that may be there and are not read. StartupError, naming file and tensor:
    one is missing, twice there, unknown, of another shape, not floating point, or its file is
    corrupt.
    """
    weights: dict[str, Tensor] = {}
    for path in weight_files(directory):
        for name, tensor in _read_file(path, shapes, ignored).items():
            if name in weights:
                raise StartupError(f"{path}: {name}: in another file too")
            weights[name] = tensor if dtype is None else tensor.to(dtype)
    missing = shapes.keys() - weights.keys()
    if missing:
        raise StartupError(f"{directory}: missing tensors: {_some(missing)}")
    return weights


def weights_digest(directory: Path, progress: Callable[[], None] = lambda: None) -> str:
    """xxh3-128 over every byte of the weight files, in hexadecimal: read once, as fast as the disk,
    or at 20 GB/s from the page cache. StartupError: a file cannot be read."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(_DIGESTED_BYTES))
    for path in weight_files(directory):
        try:
            # Length first, so that bytes cannot move from one file to the next unseen.
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb", buffering=0) as file:
                while num_bytes := file.readinto(piece):
                    digest.update(piece[:num_bytes])
                    progress()
        except OSError as exc:
            raise StartupError(f"{path}: {exc.strerror}") from exc
    return digest.hexdigest()


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StartupError(f"{path}: not an index with a weight_map: {exc!r}") from exc
    if not files:
        raise StartupError(f"{path}: weight_map: empty")
    for file in sorted(set(files.values())):
        if Path(file).name != file or not (path.parent / file).is_file():
            raise StartupError(f"{path}: weight_map: {file!r} is not a file beside it")
    return files


def _read_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str]
) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = [n for n in file.keys() if n not in ignored and not _DERIVED.fullmatch(n)]  # noqa: SIM118 - not a mapping
            unknown = set(names) - shapes.keys()
            if unknown:
                raise StartupError(f"{path}: unknown tensors: {_some(unknown)}")
            return {name: _checked(path, name, file.get_tensor(name), shapes) for name in names}
    except (SafetensorError, OSError) as exc:
        raise StartupError(f"{path}: not a readable safetensors file: {exc}") from exc


def _checked(
    path: Path, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Tensor:
    if tuple(tensor.shape) != shapes[name]:
        found, wanted = list(tensor.shape), list(shapes[name])
        raise StartupError(f"{path}: {name}: shape {found}, but the config makes it {wanted}")
    if tensor.dtype not in _LOADABLE:
        raise StartupError(f"{path}: {name}: {tensor.dtype} is not bf16, fp16 or fp32")
    return tensor


def _some(names: set[str]) -> str:
    first, more = sorted(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
