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
    require(is_unicode(text), f"{name} is not valid Unicode: it has a lone surrogate")


def is_unicode(text: str) -> bool:
    """False for a string with lone surrogates: UTF-8 cannot encode it, and no tokenizer accepts
    it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
