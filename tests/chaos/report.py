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
from tests.chaos.schedule import Fault

ENDS = ("finished", "stalled", "cancelled", "past_deadline")
"""How a request may end: read to its end; the same, with a stall of the client; cancelled by the
client; past its deadline. All that was received is right in each case."""

_COMPARED = ENDS[:2]


@dataclass
class Tally:
    """The results of requests. `ended`: their number by kind and end. `num_tokens`: of streams that
    were read to the end. `pauses_s`: for each stream of several messages that its client did
    not stall, the longest time between two of them. `violations`: all that must not occur."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_tokens: int = 0
    pauses_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    num_explained: int = 0
    """How many requests were explained while they ran."""

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
    """A whole run. `faults`: the injected ones, in words. `log_counts`: moves, preemptions and
    attempts of requests, and warnings and errors of services, counted in the logs. `spent_s`: the
    time between faults, by purpose."""

    seed: int
    tally: Tally = field(default_factory=Tally)
    faults: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    log_counts: Counter[str] = field(default_factory=Counter)
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    duration_s: float = 0.0

    @contextmanager
    def timing(self, purpose: str) -> Iterator[None]:
        """Count the time of a `with` block, between two faults, as spent on a purpose."""
        began = time.monotonic()
        yield
        self.spent_s[purpose] += time.monotonic() - began

    def record(self, fault: Fault, target: str, at_s: float) -> None:
        self.faults.append(f"{at_s:7.1f} s  {fault} hit {target}")
        self.kinds[fault.kind] += 1
        self.duration_s = at_s

    def read_log(self, log: Path) -> None:
        """Count the gateways' lines about requests, and the warnings and errors of all services."""
        for entry in _entries(log):
            event, level = str(entry.get("event")), entry.get("level")
            if event == "request_ended":
                for figure in ("num_moves", "num_preemptions"):
                    self.log_counts[figure] += int(entry[figure])
                self.log_counts["num_attempts"] += int(entry["num_attempts"]) - 1
            elif level in ("warning", "error", "critical"):
                self.log_counts[f"{level} {event.splitlines()[0]}"] += 1

    @property
    def faults_per_minute(self) -> float:
        return 60 * self.kinds.total() / max(self.duration_s, 1.0)

    def __str__(self) -> str:
        tally = self.tally
        pauses = sorted(tally.pauses_s) or [0.0]
        p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
        lines = [
            f"seed {self.seed}, {self.duration_s:.0f} s: {self.kinds.total()} faults, "
            f"{self.faults_per_minute:.1f} a minute ({_listed(self.kinds)})",
            "spent on " + ", ".join(f"{what} {s:.0f} s" for what, s in self.spent_s.items()),
            *tally.table(),
            f"compared: {tally.num_finished} whole streams, {tally.num_tokens} tokens; "
            f"{tally.num_explained} were explained while they ran",
            f"longest pause of a stream: p50 {1000 * statistics.median(pauses):.0f} ms, "
            f"p99 {1000 * p99:.0f} ms, max {1000 * pauses[-1]:.0f} ms",
            f"in the services' logs: {_listed(self.log_counts)}",
            f"limits: {limits.DESCRIPTION}",
            f"violations: {len(tally.violations)}",
            *tally.violations[:20],
        ]
        if tally.violations:
            lines += ["injected faults:", *self.faults]
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
