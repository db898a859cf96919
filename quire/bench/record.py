"""The record of one request, as its client sees it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the start of the run."""

    due: float
    """When the schedule wanted the request to be sent: in a closed loop, and for a later turn of a
    session, when it was `sent`."""
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """When chunks with tokens came."""
    counts: list[int] = field(default_factory=list)
    """The number of tokens in each of these chunks."""
    failed_at: float | None = None
    """When the request failed or was cut off."""
    num_prompt_tokens: int = 0
    num_reported: int | None = None
    """The number of generated tokens as the server counts them (`usage`)."""
    error: str | None = None
    """The kind of the error."""
    message: str = ""
    is_cut: bool = False
    """Whether the request was still running at the end of the run."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None and not self.is_cut

    @property
    def num_output_tokens(self) -> int:
        """The number that the server reported, or else what the chunks had."""
        return sum(self.counts) if self.num_reported is None else self.num_reported

    @property
    def ended(self) -> float:
        if self.failed_at is not None:
            return self.failed_at
        return self.arrivals[-1] if self.arrivals else self.sent

    @property
    def late_s(self) -> float:
        return self.sent - self.due

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2e_s(self) -> float:
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float | None:
        """The mean time of each token after the first; None if there is only one."""
        num_later = self.num_output_tokens - 1
        return (self.e2e_s - self.ttft_s) / num_later if num_later > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    def as_json(self) -> dict[str, Any]:
        return {
            "due_s": round(self.due, 6),
            "sent_s": round(self.sent, 6),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "error": self.error,
            "is_cut": self.is_cut,
            "message": self.message,
            "ttft_ms": round(1000 * self.ttft_s, 3) if self.arrivals else None,
            "e2e_ms": round(1000 * self.e2e_s, 3),
            "gaps_ms": [round(1000 * gap, 3) for gap in self.gaps_s],
        }


def running(records: Iterable[Record]) -> list[tuple[float, int]]:
    """The number of running requests after each time at which it changes."""
    changes = sorted(
        change for record in records for change in ((record.sent, 1), (record.ended, -1))
    )
    numbers = accumulate(change for _, change in changes)
    return [(at, number) for (at, _), number in zip(changes, numbers, strict=True)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, interpolated between the two nearest ranks, as NumPy does by
    default."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
