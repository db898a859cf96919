"""Copies and checks fields, for the codecs."""

from collections.abc import Iterable
from typing import Any

from services.common.errors import InvalidRequest


def values(source: object, names: Iterable[str]) -> dict[str, Any]:
    """The named attributes of a dataclass or a message, as arguments for the other one."""
    return {name: getattr(source, name) for name in names}


def require(holds: bool, problem: str) -> None:
    """Raise InvalidRequest with `problem` unless the condition holds."""
    if not holds:
        raise InvalidRequest(f"malformed message: {problem}")
