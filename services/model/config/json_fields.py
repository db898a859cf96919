"""Reads a JSON object field by field, with type checks; each error names file and field."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.files import read_small_file
from services.runtime.errors import StartupError

MAX_JSON_BYTES = 4 << 20
"""The largest JSON file that is read where the caller says nothing else. Parsed, a hostile one of
this size takes 150 MB."""


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The text of a small file. Raises StartupError if the file cannot be read, is larger, is no
    regular file, or is not UTF-8."""
    try:
        return read_small_file(path, max_bytes).decode()
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{path}: not UTF-8: {error}") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file. Raises StartupError if the file cannot be read, is larger, is no
    regular file, or is not JSON."""
    try:
        return parse_json(path, read_small_file(path, max_bytes))
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error


def parse_json(path: Path, content: str | bytes) -> Any:
    """The value of a text from the file `path`. Raises StartupError if the text is not JSON."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise StartupError(f"{path}: not JSON: nested too deeply") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise StartupError(f"{path}: not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class JsonFields:
    """The fields of a JSON object. A field with the value null counts as missing.

    `prefix` is the path of names to this object, for errors. `asked` has the names of all fields
    that were asked for. Raises StartupError if a field is missing, or has a wrong type or value.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""
    asked: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_JSON_BYTES) -> "JsonFields":
        values = read_json(path, max_bytes)
        if not isinstance(values, dict):
            raise StartupError(f"{path}: not a JSON object")
        return cls(path, values)

    def wrong(self, name: str, text: str) -> StartupError:
        return StartupError(f"{self.path}: {self.prefix}{name}: {text}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "JsonFields":
        """The same fields, and `defaults` for those that are absent. Null is not absent."""
        return JsonFields(self.path, {**defaults, **self.values}, self.prefix, self.asked)

    def unread(self) -> list[str]:
        """The names of the fields that nobody has asked for and that are not null, false, 0 or
        empty, sorted."""
        return sorted(
            name for name, value in self.values.items() if value and name not in self.asked
        )

    def value(self, name: str) -> Any:
        """The value as it is; None if it is missing."""
        self.asked.add(name)
        return self.values.get(name)

    def has(self, name: str) -> bool:
        return self.value(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"{value!r} is not an integer >= {least}")
        return value

    def number(self, name: str, default: float | None = None, positive: bool = True) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, f"{value!r} is not a number")
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise self.wrong(name, f"{value!r} is not {'positive' if positive else '0 or more'}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, f"{value!r} is not true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, f"{value!r} is not a string")
        return value

    def object(self, name: str) -> "JsonFields":
        value = self.value(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, f"{value!r} is not an object")
        return JsonFields(self.path, value, f"{self.prefix}{name}.")

    def _required(self, name: str, default: Any) -> Any:
        value = self.values[name] if self.has(name) else default
        if value is None:
            raise self.wrong(name, "missing")
        return value
