"""Bounds on what a JSON body may contain, checked on its bytes before anything is parsed.

A byte of JSON can become 30 bytes of Python objects, and a wrong value an error of a kilobyte. What
is counted here is what costs: values, strings, lists and objects. The text inside of strings does
not count. All passes over the body run in C.
"""

from services.common.errors import InvalidRequest

MAX_VALUES = 3 << 18
"""Numbers, strings, lists and objects: as many token ids as the prompts of one body may have."""
MAX_STRINGS = 1 << 17
"""Names of fields included."""
MAX_CONTAINERS = 1 << 16
"""Lists and objects."""

_DELETED = bytes(byte for byte in range(256) if byte not in b'",:[{')


def check_counts(body: bytes) -> None:
    """InvalidRequest: the body has too many values. A body that is not JSON may pass: what comes
    before its first error is within the bounds."""
    if b"\\" in body:
        # An escape begins at the first backslash of a run, so that pairs go before escaped quotes.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(None, _DELETED)
    del body
    _check("strings", (marks.count(b'"') + 1) // 2, MAX_STRINGS)
    pieces = marks.split(b'"')[::2]
    del marks  # a body without strings is one piece, as large as it was
    outside = b"".join(pieces)
    num_containers = outside.count(b"[") + outside.count(b"{")
    _check("lists and objects", num_containers, MAX_CONTAINERS)
    _check("values", outside.count(b",") + num_containers + 1, MAX_VALUES)


def _check(name: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequest(f"the body has {number} {name}, at most {most}")
