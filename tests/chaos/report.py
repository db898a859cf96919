"""The results of a run."""

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import limits
from tests.chaos.schedule import Event

ENDS = ("finished", "stalled", "cancelled", "late")
"""How a request may end: read to its end; the same, with a stall of the client; cancelled by the
client; past its deadline. All that was received is right in each case."""

_COMPARED = ENDS[:2]


@dataclass
class Tally:
    """What users saw. `ended`: requests by kind and end; `num_tokens`, of streams that were read to
    the end; `pauses_s`: the longest time between two tokens of each stream without a stall that did
    not come whole; `faults`: all that must not occur."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_tokens: int = 0
    pauses_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def num_finished(self) -> int:
        """How many streams were compared to their end."""
        return sum(self.ended[kind, end] for kind, end in self.ended if end in _COMPARED)

    def table(self) -> Iterator[str]:
        """A line for each kind of request, and one for the sum."""
        every = {kind: Counter[str]() for kind, _ in sorted(self.ended)} | {"all": Counter[str]()}
        for (kind, end), number in self.ended.items():
            every[kind][end] += number
            every["all"][end] += number
        yield f"{'requests':24}" + "".join(f"{end:>12}" for end in ENDS)
        for kind, ended in every.items():
            yield f"{kind:24}" + "".join(f"{ended[end]:12}" for end in ENDS)


@dataclass
class Report:
    """A whole run. `events`: the events, in words. `inside`: the services' reactions, from their
    logs. `spent_s`: the seconds spent, by purpose."""

    seed: int
    tally: Tally = field(default_factory=Tally)
    events: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lasted_s: float = 0.0

    @contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Count the time of a block, between two events, as spent `on` a purpose."""
        began = time.monotonic()
        yield
        self.spent_s[on] += time.monotonic() - began

    def happened(self, event: Event, whom: str, at_s: float) -> None:
        self.events.append(f"{at_s:7.1f} s  {event} hit {whom}")
        self.kinds[event.kind] += 1
        self.lasted_s = at_s

    def read_log(self, log: Path) -> None:
        """Count the gateways' lines about requests, and the warnings and errors of all services."""
        for entry in _entries(log):
            event, level = str(entry.get("event")), entry.get("level")
            if event == "request_ended":
                for figure in ("num_moves", "num_preemptions"):
                    self.inside[figure] += int(entry[figure])
                self.inside["num_attempts"] += int(entry["num_attempts"]) - 1
            elif level in ("warning", "error", "critical"):
                self.inside[f"{level} {event.splitlines()[0]}"] += 1

    @property
    def events_a_minute(self) -> float:
        return 60 * self.kinds.total() / max(self.lasted_s, 1.0)

    def __str__(self) -> str:
        tally = self.tally
        pauses = sorted(tally.pauses_s) or [0.0]
        p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
        lines = [
            f"seed {self.seed}, {self.lasted_s:.0f} s: {self.kinds.total()} events, "
            f"{self.events_a_minute:.1f} a minute ({_listed(self.kinds)})",
            "spent on " + ", ".join(f"{what} {s:.0f} s" for what, s in self.spent_s.items()),
            *tally.table(),
            f"compared: {tally.num_finished} whole streams, {tally.num_tokens} tokens",
            f"longest pause of a stream: p50 {1000 * statistics.median(pauses):.0f} ms, "
            f"p99 {1000 * p99:.0f} ms, max {1000 * pauses[-1]:.0f} ms",
            f"inside: {_listed(self.inside)}",
            f"limits: {limits.TOLD}",
            f"faults: {len(tally.faults)}",
            *tally.faults[:20],
        ]
        if tally.faults:
            lines += ["what happened:", *self.events]
        return "\n".join(lines)


def _listed(counted: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counted.items()))


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    with log.open(errors="replace") as lines:
        for line in lines:
            if line.startswith("{"):
                try:
                    yield json.loads(line)
                except ValueError:  # two processes wrote at once
                    continue
