"""Reads the header of a GGUF file: metadata, and the type, shape and place of each tensor.

    magic "GGUF", version (u32), number of tensors (u64), number of metadata fields (u64)
    metadata fields: name, type (u32), value
    tensors: name, number of dimensions (u32), dimensions (u64, innermost first), type (u32),
             offset (u64) from the end of the header
    the tensors' bytes, from the next multiple of `general.alignment`

All numbers are little-endian. A string is its length (u64) and UTF-8.

A large model is several files, `NAME-00001-of-00003.gguf` and so on. Each has tensors and a header
of its own; the first has the metadata.

The `gguf` package, which dequantizes tensors, takes 20 to 50 times as long to read a header with
50,000 to 260,000 tokens: seconds, which a start does not have.
"""

import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from services.model.config.json_fields import JsonFields
from services.model.config.layout import Shape
from services.runtime.errors import StartupError

V = TypeVar("V")

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_FORMS = {code: struct.Struct(f"<{code}") for code in _NUMBERS.values()}
_STRING, _ARRAY = 8, 9


class TensorType(NamedTuple):
    """How a tensor is stored: blocks of `values` values along the innermost dimension."""

    name: str
    values: int
    num_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
_OTHER_TYPES = {15: "Q8_K", 19: "IQ1_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The name of one of several files of a model."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file `path`."""

    type: TensorType
    shape: Shape  # outermost dimension first
    path: Path
    begin: int  # offset of its bytes in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model's file, or the first of several. `paths` are all of them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    paths: tuple[Path, ...] = ()

    @property
    def fields(self) -> JsonFields:
        """The metadata, with checks and errors."""
        return JsonFields(self.path, self.metadata)

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Read the header of `path`, and of all other files if it is the first file of a model.
        Raises StartupError if a file is missing, is not GGUF, is truncated, or has a tensor of a
        type that is not supported."""
        try:
            status = path.stat()
            return _cached(path, status.st_ino, status.st_size, status.st_mtime_ns)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a checkpoint's path means: the path itself, or the only such file in a
    directory without safetensors (of a model in several files the first one). None if the
    checkpoint is in another format. Raises StartupError if the directory has several models."""
    if path.is_file():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    found = sorted(path.glob("*.gguf"))
    models = {_PART.sub(r"\1", file.name): file for file in reversed(found)}
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models.values())[:3])
        raise StartupError(f"{path}: {len(models)} GGUF models ({names} ...); name one of them")
    return found[0] if found else None


def _unreadable(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path}: not a readable GGUF file: {error}")


class _Reader:
    """Reads values one after another. Raises ValueError if the file ends before a value."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def number(self, code: str) -> Any:
        form = _FORMS[code]
        return form.unpack_from(self.data, self._taken(form.size))[0]

    def text(self) -> str:
        length = self.number("Q")
        begin = self._taken(length)
        # llama.cpp cuts some texts of models inside of a character.
        return self.data[begin : begin + length].decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"metadata of unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if length > len(self.data):
            raise ValueError(f"an array of {length} values")
        if kind == _ARRAY:
            raise ValueError("an array of arrays")
        if code := _NUMBERS.get(kind):
            form = struct.Struct(f"<{length}{code}")
            return list(form.unpack_from(self.data, self._taken(form.size)))
        return [self.value(kind) for _ in range(length)]

    def _taken(self, num_bytes: int) -> int:
        """Advance; returns the position before."""
        begin = self.position
        if num_bytes > len(self.data) - begin:
            raise ValueError("the file ends within its header")
        self.position += num_bytes
        return begin


@lru_cache(maxsize=1)
def _cached(path: Path, *_status: int) -> GgufFile:
    """A start reads the header several times: for the configuration, the tokenizer, the template.
    With 150,000 tokens that takes 0.3 s each time."""
    first = _one(path)
    num_files = first.fields.integer("split.count", 1, least=0)
    if num_files <= 1:
        return first
    others = [_one(other) for other in _others(first, num_files)]
    for number, other in enumerate(others, start=1):
        if (found := other.fields.integer("split.no", least=0)) != number:
            raise other.fields.wrong("split.no", f"{found}, but by its name {number}")
    tensors = _unique((n, t) for file in (first, *others) for n, t in file.tensors.items())
    wanted = first.fields.integer("split.tensors.count", len(tensors), least=0)
    if len(tensors) != wanted:
        raise first.fields.wrong("split.tensors.count", f"{wanted}, but there are {len(tensors)}")
    return replace(first, tensors=tensors, paths=(path, *(other.path for other in others)))


def _others(first: GgufFile, num_files: int) -> list[Path]:
    """The paths of a model's files after the first one."""
    number = first.fields.integer("split.no", least=0) + 1
    name = _PART.fullmatch(first.path.name)
    if name is None or (int(name[2]), int(name[3])) != (number, num_files):
        ending = f"-{number:05}-of-{num_files:05}.gguf"
        raise first.fields.wrong("split.count", f"{num_files}; then the name ends with {ending}")
    paths = [
        first.path.with_name(f"{name[1]}-{part:05}-of-{num_files:05}.gguf")
        for part in range(1, num_files + 1)
    ]
    if number != 1:
        raise StartupError(f"{first.path}: part {number} of {num_files}; name {paths[0].name}")
    return paths[1:]


def _one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Reader(data))
    except (OSError, ValueError) as error:  # An empty file cannot be mapped.
        raise _unreadable(path, error) from error


def _read(path: Path, reader: _Reader) -> GgufFile:
    if reader.data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC.decode()}")
    reader.position = len(MAGIC)
    if (version := reader.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version} is none of {_VERSIONS}")
    num_tensors, num_fields = reader.number("Q"), reader.number("Q")
    metadata = _unique((reader.text(), reader.value(reader.number("I"))) for _ in range(num_fields))
    places = _unique(_place(path, reader) for _ in range(num_tensors))
    alignment = JsonFields(path, metadata).integer("general.alignment", _ALIGNMENT)
    if alignment % 8 or any(tensor.begin % alignment for tensor in places.values()):
        raise ValueError(f"tensors are not aligned to {alignment} bytes, a multiple of 8")
    begin = -(-reader.position // alignment) * alignment
    tensors = {name: replace(tensor, begin=begin + tensor.begin) for name, tensor in places.items()}
    for name, tensor in tensors.items():
        if tensor.begin + tensor.num_bytes > len(reader.data):
            raise ValueError(f"the file ends within tensor {name}")
    return GgufFile(path, metadata, tensors, (path,))


def _unique(items: Iterable[tuple[str, V]]) -> dict[str, V]:
    found: dict[str, V] = {}
    for name, value in items:
        if name in found:
            raise ValueError(f"{name} occurs twice")
        found[name] = value
    return found


def _place(path: Path, reader: _Reader) -> tuple[str, GgufTensor]:
    """A tensor's record; `begin` counts from the end of the header."""
    name = reader.text()
    num_dimensions = reader.number("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(f"tensor {name} of {num_dimensions} dimensions")
    shape = tuple(reader.number("Q") for _ in range(num_dimensions))[::-1]
    kind = reader.number("I")
    if kind not in TYPES:
        known = ", ".join(t.name for t in TYPES.values())
        named = _OTHER_TYPES.get(kind, f"type {kind}")
        raise StartupError(f"{path}: {name}: {named} is not supported, only {known}")
    stored = TYPES[kind]
    num_blocks, rest = divmod(shape[-1], stored.values)
    if rest:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} in blocks of {stored.values}")
    for size in shape[:-1]:
        num_blocks *= size
    begin = reader.number("Q")
    return name, GgufTensor(stored, shape, path, begin, num_blocks * stored.num_bytes)
