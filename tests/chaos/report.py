"""What came of a run."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.schedule import Event


@dataclass
class Tally:
    """What users saw. `ended`: requests by what became of them; `num_tokens` and `pauses_s`, the
    longest from one token to the next, of streams that were read to their end without a stall;
    `faults` is what must not be."""

    ended: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    pauses_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass
class Report:
    """`events` is what happened, in words; `inside` what the services did about it, by their
    logs."""

    seed: int
    tally: Tally = field(default_factory=Tally)
    events: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    lasted_s: float = 0.0

    def happened(self, event: Event, whom: str, at_s: float) -> None:
        self.events.append(f"{at_s:7.1f} s  {event} hit {whom}")
        self.kinds[event.kind] += 1
        self.lasted_s = at_s

    def read_log(self, log: Path) -> None:
        """Count what the gateways said of each request, and warnings and errors of all."""
        for entry in _entries(log):
            event, level = str(entry.get("event")), entry.get("level")
            if event == "request_ended":
                for figure in ("num_moves", "num_preemptions"):
                    self.inside[figure] += int(entry[figure])
                self.inside["num_attempts"] += int(entry["num_attempts"]) - 1
            elif level in ("warning", "error", "critical"):
                self.inside[f"{level} {event.splitlines()[0]}"] += 1

    def __str__(self) -> str:
        tally = self.tally
        pauses = sorted(tally.pauses_s) or [0.0]
        p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
        lines = [
            f"seed {self.seed}, {self.lasted_s:.0f} s: {self.kinds.total()} events "
            f"({_listed(self.kinds)})",
            f"requests: {_listed(tally.ended)}; {tally.num_tokens} tokens",
            f"longest pause of a stream: p50 {1000 * statistics.median(pauses):.0f} ms, "
            f"p99 {1000 * p99:.0f} ms, max {1000 * pauses[-1]:.0f} ms",
            f"inside: {_listed(self.inside)}",
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
