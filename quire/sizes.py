"""Sizes and durations in text: 2GiB as users write it, 1.5 KiB as Quire prints it."""

import math
import re


def memory_size(text: str) -> str:
    """Returns `text` if it is a size; the worker parses it. ValueError: it is not a size."""
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*([KMGT]iB|[kMGT]?B)?\s*", text):
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return text


def duration(text: str) -> float:
    """Returns the number. ValueError: it is no finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{text!r} is not a number from 0 on")
    return number


def format_size(num_bytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
