"""Copies blocks from one arena to another; the arenas may be on different devices."""

from collections.abc import Iterator

from torch import Tensor


def copy_between(target: Tensor, source: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of `source` to block `pairs[i, 1]` of `target`. A run of blocks that
    is contiguous in both arenas takes one copy."""
    for first, to, count in _runs(pairs.tolist()):
        target[to : to + count].copy_(source[first : first + count])


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Give contiguous runs as (first source, first target, number of blocks)."""
    begin = 0
    for end in range(1, len(pairs) + 1):
        block, to = pairs[begin]
        count = end - begin
        if end == len(pairs) or tuple(pairs[end]) != (block + count, to + count):
            yield block, to, count
            begin = end
