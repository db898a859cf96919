"""Reads the headers of a checkpoint's safetensors files: one file, or shards with an index."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.files import open_regular_file
from services.model.checkpoint.stored_tensors import FLOATS, Expected, expected_tensors
from services.model.config.json_fields import read_json
from services.model.config.layout import Shape, ignored_weights
from services.model.config.model_config import ModelConfig
from services.model.gguf.file import GgufFile, gguf_file
from services.runtime.errors import StartupError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Old Llama checkpoints contain the RoPE frequencies, which the config already determines."""

_LENGTH_BYTES = 8
"""A file begins with the length of its header, little-endian; then the header (JSON) follows, then
the tensors."""

_MAX_HEADER_BYTES = 16 << 20
"""Room for 100,000 tensors. The largest published headers have 1 MB."""

_MAX_INDEX_BYTES = 32 << 20

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""The bytes of a value, by dtype. Tensors of other dtypes are refused later, by their names."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A header's record of one tensor."""

    dtype: str
    """As in safetensors, such as BF16."""

    shape: Shape

    begin: int
    """The offset of the tensor's first byte from the end of the header."""

    end: int
    """The offset after the tensor's last byte."""


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The GGUF or safetensors files of a checkpoint, sorted by name. Raises StartupError if there
    are no files, or if the index is invalid or names a missing file."""
    if (gguf := gguf_file(directory)) is not None:
        return GgufFile.read(gguf).paths
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise StartupError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    return tuple(sorted({directory / name for name in _read_index(index).values()}))


def checked_weights(directory: Path, config: ModelConfig) -> dict[Path, list[str]]:
    """The names of the tensors in each file of a checkpoint; together they are all that a model of
    this config needs. Reads only the headers.

    StartupError, with file and tensor: a tensor is missing, duplicate, unknown, or of another shape
    or dtype, or a file is corrupt.
    """
    headers = {path: _used(read_header(path), config) for path in weight_files(directory)}
    expected = expected_tensors(config, {name for header in headers.values() for name in header})
    seen: set[str] = set()
    for path, header in headers.items():
        if unknown := header.keys() - expected.keys():
            raise StartupError(f"{path}: unknown tensors: {_some(unknown)}")
        for name, tensor in header.items():
            if name in seen:
                raise StartupError(f"{path}: {name}: in another file too")
            _check(path, name, tensor, expected[name])
        seen.update(header)
    if missing := {name for name, e in expected.items() if not e.optional} - seen:
        raise StartupError(f"{directory}: missing tensors: {_some(missing)}")
    return {path: list(header) for path, header in headers.items()}


def _used(header: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    ignored = ignored_weights(config)
    return {n: t for n, t in header.items() if n not in ignored and not _DERIVED.fullmatch(n)}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises StartupError if the file is not a
    safetensors file, or is truncated, or if its tensors overlap or leave gaps."""
    try:
        with open_regular_file(path) as file:
            num_bytes = path.stat().st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if num_bytes < _LENGTH_BYTES + length:
                raise ValueError(f"{num_bytes} bytes, shorter than its header")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes, at most {_MAX_HEADER_BYTES}")
            fields = json.loads(file.read(length))
        tensors = {name: _stored(entry) for name, entry in fields.items() if name != "__metadata__"}
        wanted = _LENGTH_BYTES + length + _end(tensors)
        if num_bytes != wanted:
            raise ValueError(f"{num_bytes} bytes, but its header requires {wanted}")
    except RecursionError as error:
        raise StartupError(f"{path}: its header is nested too deeply") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{path}: not a readable safetensors file: {error}") from error
    return tensors


def _stored(entry: dict[str, Any]) -> StoredTensor:
    shape, offsets = tuple(entry["shape"]), tuple(entry["data_offsets"])
    if len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
        raise ValueError(f"shape {shape} at bytes {offsets}")
    return StoredTensor(str(entry["dtype"]), shape, *offsets)


def _end(tensors: dict[str, StoredTensor]) -> int:
    """Where the last tensor ends. Raises ValueError if the tensors do not follow one another."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        size = tensor.end - tensor.begin
        if tensor.begin != position:
            raise ValueError(f"{name} begins at byte {tensor.begin}, not at {position}")
        item_bytes = _ITEM_BYTES.get(tensor.dtype)
        wanted = size if item_bytes is None else math.prod(tensor.shape) * item_bytes
        if size < 0 or size != wanted:
            raise ValueError(f"{name} has {size} bytes, and its shape needs {wanted}")
        position = tensor.end
    return position


def _read_index(path: Path) -> dict[str, str]:
    """The index's map from tensor names to files. Raises StartupError if the index is invalid."""
    try:
        weight_map = read_json(path, _MAX_INDEX_BYTES)["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as exc:
        raise StartupError(f"{path}: not an index with a weight_map: {exc!r}") from exc
    if not files:
        raise StartupError(f"{path}: weight_map: empty")
    for file in sorted(set(files.values())):
        if Path(file).name != file or not (path.parent / file).is_file():
            raise StartupError(f"{path}: weight_map: {file!r} is not a file beside it")
    return files


def _check(path: Path, name: str, tensor: StoredTensor, expected: Expected) -> None:
    if tensor.shape not in expected.shapes:
        found, wanted = list(tensor.shape), " or ".join(str(list(s)) for s in expected.shapes)
        raise StartupError(f"{path}: {name}: shape {found}, but the config makes it {wanted}")
    if tensor.dtype not in expected.dtypes:
        wanted = "bf16, fp16 or fp32" if expected.dtypes == FLOATS else " or ".join(expected.dtypes)
        raise StartupError(f"{path}: {name}: {tensor.dtype} is not {wanted}")


def _some(names: set[str]) -> str:
    first, more = sorted(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
