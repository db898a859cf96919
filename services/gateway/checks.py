"""Checks of single values of a request."""

import math
import struct

from services.runtime.errors import InvalidRequest


def require(holds: bool, problem: str, param: str | None = None) -> None:
    """Raises InvalidRequest with the text `problem` and the parameter at fault unless `holds`."""
    if not holds:
        raise InvalidRequest(problem, param)


def check_text(name: str, text: str, max_chars: int, param: str | None = None) -> None:
    """Raises InvalidRequest if `text` is too long or has lone surrogates. `param` is the parameter
    that has the text; None is `name`."""
    param, size = param or name, len(text)
    require(size <= max_chars, f"{name} has {size} characters, at most {max_chars}", param)
    try:
        text.encode()  # UTF-8 has no lone surrogates, and no tokenizer accepts them
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} is not valid Unicode: it has a lone surrogate", param
        ) from error


def float32(name: str, value: float) -> float:
    """`value` rounded to 32 bits, the precision of the wire.

    Raises InvalidRequest if the number is not finite, or too large for 32 bits.
    """
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}, not a finite number", name)
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError as error:
        raise InvalidRequest(f"{name} is {value:g}, too large", name) from error
