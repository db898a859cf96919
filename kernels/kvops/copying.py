"""Blocks from one arena to another, on whatever devices they are."""

from collections.abc import Iterator

from torch import Tensor


def copy_between(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """Block `pairs[i, 0]` of `source` to `pairs[i, 1]` of `target`. Blocks that lie side by side in
    both are one piece of memory, and one copy."""
    for first, to, count in _runs(pairs.tolist()):
        target[to : to + count].copy_(source[first : first + count])


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, how many)."""
    begin = 0
    for end in range(1, len(pairs) + 1):
        block, to = pairs[begin]
        count = end - begin
        if end == len(pairs) or tuple(pairs[end]) != (block + count, to + count):
            yield block, to, count
            begin = end
