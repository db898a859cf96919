"""Checks of single values of a request."""

import math
import struct

from services.common.errors import InvalidRequest


def require(holds: bool, problem: str) -> None:
    """Raises InvalidRequest with the text `problem` unless `holds`."""
    if not holds:
        raise InvalidRequest(problem)


def check_text(name: str, text: str, max_chars: int) -> None:
    """Raises InvalidRequest if `text` is too long or has lone surrogates."""
    require(len(text) <= max_chars, f"{name} has {len(text)} characters, at most {max_chars}")
    try:
        text.encode()  # UTF-8 has no lone surrogates, and no tokenizer accepts them
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode: it has a lone surrogate") from error


def float32(name: str, value: float) -> float:
    """`value` rounded to 32 bits, the precision of the wire.

    InvalidRequest: it is not finite, or too large for 32 bits.
    """
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}, not a finite number")
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError as error:
        raise InvalidRequest(f"{name} is {value:g}, too large") from error
