"""Times decode steps with and without something, in turn."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pairs:
    """Medians; `ratio`: of the ratios of pairs."""

    what: str
    streams: int
    plain_ms: float
    with_ms: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.what:<28}{self.streams:>4} streams, {self.with_ms:.2f} ms a step, "
            f"{self.plain_ms:.2f} without: {self.ratio - 1:+.1%}"
        )


def in_turn(what: str, streams: int, rounds: int, step: Callable[[int, bool], float]) -> Pairs:
    """`step`: the seconds of a step of a round, with it or without."""
    pairs = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        seconds = {is_with: step(number, is_with) for is_with in order}
        pairs.append((seconds[False], seconds[True]))
    plain, other = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(other / plain for plain, other in pairs)
    return Pairs(what, streams, plain, other, ratio)
