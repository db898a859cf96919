"""Tickets with every field wrong: of single sequences, groups and searches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from quire.v1 import ticket_pb2

Changes = Sequence[tuple[str, Any]]
"""(path of a field, its new value): "sequences.1.index" changes the second sequence only,
"sequences.index" all of them."""

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 10, 13, 14, 15, 31, 32, 63, 64, 65, 2**31, 2**32 - 1])
LARGE = NUMBERS | st.sampled_from([2**52 - 1, 2**52, 2**53, 2**63, 2**64 - 1])
REQUESTS = st.sampled_from(["r1", "r2", "r2", "r2", "r4", "r5", "", "x" * 300])
FLOATS = st.sampled_from([0.0, -1.0, 0.5, 1.0, 1e30, float("nan"), float("inf")])
SCORES = st.sampled_from([0.0, -1.0, -2.5, 1e30, float("nan"), float("-inf"), float("inf")])
BLOCKS = st.lists(st.integers(0, 70) | st.sampled_from([639, 640, 2**31]), max_size=6)
WIDTHS = st.sampled_from([0, 1, 2, 3, 4, 8, 9, 16, 17, 64, 2**31, 2**32 - 1])

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


def changes(correct_prompt: Sequence[int]) -> st.SearchStrategy[tuple[str, Any]]:
    def to(path: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
        return st.tuples(st.just(path), values)

    of_one = st.sampled_from(["sequences", "sequences.0", "sequences.1", "sequences.2"])
    fields = {
        "index": NUMBERS,
        "token_ids": st.lists(NUMBERS, max_size=16),
        "block_ids": BLOCKS,
        "num_computed_tokens": NUMBERS,
    }
    return st.one_of(
        to("request_id", REQUESTS),
        to("attempt", NUMBERS),
        to("order", LARGE.filter(bool)),  # what comes first in line may starve others
        to("pool_id", st.sampled_from(["pool", "", "other", "{}", "x" * 300])),
        to("holder_id", st.sampled_from([*_HOLDERS, "h-r2+", "", "x" * 300])),
        to("holder_epoch", LARGE),
        to("root_hash", st.sampled_from([bytes(16), b"x" * 16, b"", bytes(15)])),
        to("timeout_ms", LARGE),
        to("num_cached_tokens", NUMBERS),
        to("prompt_token_ids", st.lists(NUMBERS, max_size=70)),
        to("prompt_token_ids", st.just(correct_prompt)),
        to("sequences", st.sampled_from(sorted(WHOLE))),
        *(
            of_one.flatmap(lambda where, n=name: to(f"{where}.{n}", fields[n]))  # type: ignore[misc]
            for name in fields
        ),
        *(to(f"sampling.{name}", values) for name, values in _SAMPLING.items()),
        *(to(f"sampling.beam.{name}", values) for name, values in BEAM.items()),
        to("beams.scores", st.lists(SCORES, max_size=5)),
        to("beams.finished", st.lists(HYPOTHESES, max_size=5)),
        to("swapped.pool_id", st.sampled_from(["colder", "pool", "", "{}", "x" * 300])),
        to("swapped.holder_id", st.sampled_from([*_HOLDERS, "h-r3", "", "x" * 300])),
        to("swapped.holder_epoch", LARGE),
        to("swapped.tables", st.sampled_from(TABLES)),
        to("swapped.tables.index", NUMBERS),
        to("swapped.tables.block_ids", BLOCKS),
        to("swapped.tables.1.block_ids", BLOCKS),
    )


_HOLDERS = ("h-r1", "h-r2", "h-r4", "h-r5", "h-new")
_SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": FLOATS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "top_k": NUMBERS,
    "seed": LARGE,
    "max_tokens": NUMBERS,
    "stop_token_ids": st.lists(NUMBERS, max_size=5),
    "logprobs": NUMBERS,
    "repetition_penalty": FLOATS,
    "presence_penalty": FLOATS,
    "frequency_penalty": FLOATS,
    "allowed_token_ids": st.lists(NUMBERS, max_size=5),
    "min_tokens": NUMBERS,
    "n": WIDTHS,
}
BEAM: dict[str, st.SearchStrategy[Any]] = {
    "width": WIDTHS,
    "length_penalty": FLOATS | st.sampled_from([-4.0, 4.0, 4.5]),
    "early_stopping": st.sampled_from([0, 1, 2, 3, 99]),
}
HYPOTHESES = st.builds(
    ticket_pb2.Hypothesis,
    token_ids=st.lists(NUMBERS, max_size=16),
    score=SCORES,
    finish_reason=st.sampled_from([0, 1, 2]),
)


def forge(base: ticket_pb2.Ticket, changes: Changes) -> ticket_pb2.Ticket:
    forged = ticket_pb2.Ticket()
    forged.CopyFrom(base)
    for path, value in changes:
        change(forged, path, value)
    return forged


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
