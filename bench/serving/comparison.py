"""Figures of several contestants over several rounds, and the table of their ratios."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.harness import markdown, spread

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Row:
    """The name of a compared figure, such as `8 streams: decode tok/s`."""

    name: str
    better: Better


class Comparison:
    """Collects a value a round for each row and contestant. The ratios are of `ours`."""

    def __init__(self, ours: str, peers: Sequence[str]) -> None:
        self._ours = ours
        self._columns = (ours, *peers)
        self._values: dict[Row, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, contestant: str, row: Row, value: float) -> None:
        self._values[row][contestant].append(value)

    def ratio(self, row: Row) -> float | None:
        """Our median by the best peer's; None without one of them, or of nothing."""
        medians = {name: statistics.median(values) for name, values in self._values[row].items()}
        ours = medians.pop(self._ours, None)
        if ours is None or not medians:
            return None
        best = max(medians.values()) if row.better == "higher" else min(medians.values())
        return ours / best if best else None

    def table(self) -> str:
        """Medians with the lowest and the highest; in the last column ours by the best peer's."""
        header = ["", *self._columns, "ratio", "better"]
        return markdown(header, [self._cells(row) for row in self._values])

    def _cells(self, row: Row) -> list[str]:
        values = self._values[row]
        ratio = self.ratio(row)
        return [
            row.name,
            *(spread(values.get(name, [])) for name in self._columns),
            "-" if ratio is None else f"{ratio:.2f}x",
            row.better,
        ]
