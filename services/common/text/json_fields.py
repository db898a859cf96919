"""Reads a JSON object field by field, with type checks; each error names file and field."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import StartupError


@dataclass(frozen=True, slots=True)
class JsonFields:
    """The fields of a JSON object. A field with the value null counts as missing.

    `prefix`: the path of names that leads to this object, for errors. `asked`: the names of all
    fields that were asked for. StartupError: a field is missing, or has a wrong type or value.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""
    asked: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def read(cls, path: Path) -> "JsonFields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise StartupError(f"{path}: {exc.strerror}") from exc
        except ValueError as exc:  # not JSON, or not UTF-8
            raise StartupError(f"{path}: not JSON: {exc}") from exc
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
