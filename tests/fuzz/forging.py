"""Changes of the fields of messages: of single sequences, groups and searches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from quire.v1 import ticket_pb2

Changes = Sequence[tuple[str, Any]]
"""(path of a field, its new value): "sequences.1.index" changes the second sequence only,
"sequences.index" all of them."""

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 10, 13, 14, 15, 31, 32, 63, 64, 65, 2**31, 2**32 - 1])
SCORES = st.sampled_from([0.0, -1.0, -2.5, 1e30, float("nan"), float("-inf"), float("inf")])

WHOLE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "none": lambda there: [],
    "twice": lambda there: there * 2,
    "first": lambda there: there[:1],
    "reversed": lambda there: there[::-1],
    "more than there may be": lambda there: [_numbered(there[0], n) for n in range(100)],
    "tables crossed": lambda there: _crossed(there),
    "one table for all": lambda there: _alike(there, "block_ids"),
    "one length for all": lambda there: _alike(there, "token_ids"),
}
"""Changes of all sequences of a ticket."""
TABLES = ["none", "twice", "first", "reversed", "tables crossed", "one table for all"]
"""Changes of the block tables in a swap pool."""


HYPOTHESES = st.builds(
    ticket_pb2.Hypothesis,
    token_ids=st.lists(NUMBERS, max_size=16),
    score=SCORES,
    finish_reason=st.sampled_from([0, 1, 2]),
)


def change(message: Any, path: str, value: Any) -> None:
    """Changes that a field cannot hold are left out."""
    *where, name = path.split(".")
    for each in list(_found(message, where)):
        if isinstance(value, str) and hasattr(getattr(each, name), "add"):
            there = list(getattr(each, name))
            each.ClearField(name)
            getattr(each, name).extend(WHOLE[value](there) if there else [])
        else:
            _assign(each, name, value)


def _found(message: Any, where: Sequence[str]) -> Iterator[Any]:
    if not where:
        yield message
        return
    inner = getattr(message, where[0])
    if not hasattr(inner, "add"):
        yield from _found(inner, where[1:])
        return
    which, rest = where[1:2], where[2:]
    if not which or not which[0].isdigit():
        which, rest = [], where[1:]
    for number, each in enumerate(inner):
        if not which or which == [str(number)]:
            yield from _found(each, rest)


def _assign(message: Any, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        message.ClearField(name)
        with contextlib.suppress(ValueError):
            getattr(message, name).extend(value)
        return
    with contextlib.suppress(ValueError):
        setattr(message, name, value)


def _copy(sequence: Any) -> Any:
    copy = type(sequence)()
    copy.CopyFrom(sequence)
    return copy


def _numbered(sequence: Any, index: int) -> Any:
    copy = _copy(sequence)
    copy.index = index
    return copy


def _crossed(there: list[Any]) -> list[Any]:
    """Each sequence with the block table of the next one."""
    copies = [_copy(one) for one in there]
    for copy, other in zip(copies, there[1:] + there[:1], strict=True):
        _assign(copy, "block_ids", list(other.block_ids))
    return copies


def _alike(there: list[Any], name: str) -> list[Any]:
    copies = [_copy(one) for one in there]
    for copy in copies:
        _assign(copy, name, list(getattr(there[0], name)))
    return copies
