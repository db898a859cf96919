"""Bounds the number of values in a JSON body, by a check of its bytes before the body is parsed.

A byte of JSON can become 30 bytes of Python objects, and a wrong value an error of a kilobyte. So
the check counts what costs memory: values, strings, lists and objects. The text inside strings does
not count. All passes over the body run in C.
"""

from services.runtime.errors import InvalidRequest

MAX_VALUES = 3 << 18
"""Limit for numbers, strings, lists and objects together, and so for the token ids of all prompts
of one body."""
MAX_STRINGS = 1 << 17
"""Limit for strings, names of fields included."""
MAX_CONTAINERS = 1 << 16
"""Limit for lists and objects."""

_DELETED = bytes(byte for byte in range(256) if byte not in b'",:[{')


def check_counts(body: bytes) -> None:
    """Raises InvalidRequest if the body has too many values.

    A body that is not valid JSON may pass. Its part before the first error, which is all that gets
    parsed, is within the bounds.
    """
    if b"\\" in body:
        # An escape begins at the first backslash of a run, so escaped backslashes are removed
        # before escaped quotes.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(None, _DELETED)
    del body
    _check("strings", (marks.count(b'"') + 1) // 2, MAX_STRINGS)
    pieces = marks.split(b'"')[::2]
    del marks  # if the body has no strings, the one piece is as large as the body
    outside = b"".join(pieces)
    num_containers = outside.count(b"[") + outside.count(b"{")
    _check("lists and objects", num_containers, MAX_CONTAINERS)
    _check("values", outside.count(b",") + num_containers + 1, MAX_VALUES)


def _check(name: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequest(f"the body has {number} {name}, at most {most}")
