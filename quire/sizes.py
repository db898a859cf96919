"""Sizes and durations in text: 2GiB as users write it, 1.5 KiB as Quire prints it."""

import math
import re

_UNITS = {
    **{"": 1, "B": 1},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    **{"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


def parse_size(text: str) -> int:
    """The bytes of a size such as "2GiB", "1.5 GB" or "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"{text!r} is not a size such as 512MiB: a number and one of {units}")
    return int(float(match[1]) * _UNITS[match[2]])


def memory_size(text: str) -> str:
    """Return `text` if it is a size, or empty for none. Raises ValueError if not."""
    if text:
        parse_size(text)
    return text


def duration(text: str) -> float:
    """Return the number. Raises ValueError unless it is a finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{text!r} is not a number from 0 on")
    return number


def format_size(num_bytes: int) -> str:
    """Return a size as text: 1536 is '1.5 KiB'."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
