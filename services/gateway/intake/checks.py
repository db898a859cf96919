"""What admission asks of single values."""

import math
import struct

from services.common.errors import InvalidRequest


def require(holds: bool, problem: str) -> None:
    """InvalidRequest: it does not."""
    if not holds:
        raise InvalidRequest(problem)


def check_text(name: str, text: str, max_chars: int) -> None:
    """InvalidRequest: it is too long, or no text."""
    require(len(text) <= max_chars, f"{name} has {len(text)} characters, at most {max_chars}")
    require(is_unicode(text), f"{name} is not valid Unicode: it has a lone surrogate")


def is_unicode(text: str) -> bool:
    """False for a string with lone surrogates: it has no UTF-8, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def float32(name: str, value: float) -> float:
    """Rounded to the 32 bits that travel. InvalidRequest: not finite."""
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}, not a finite number")
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError as error:
        raise InvalidRequest(f"{name} is {value:g}, too large") from error
