"""Decides when an ended service starts again, and when a restart is hopeless."""

import re
from dataclasses import dataclass

CANNOT_START = 2
"""Exit status of a service that gives a reason why it cannot start."""
MAX_SAME_FAILURES = 2
"""Equal failures in a row after which a restart is hopeless, if the service gives no reason."""
STEADY_S = 10.0
"""A service that ran this long had started successfully."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process of a service."""

    status: int
    """The exit status, or the negative number of the signal."""
    lived_s: float
    last_line: str
    """The last line that the process wrote."""

    @property
    def failed_to_start(self) -> bool:
        return self.status == CANNOT_START or self.lived_s < STEADY_S

    def __str__(self) -> str:
        """The status, with the reason if the service gave one. Other failures are in the log, which
        the supervisor has already forwarded."""
        if self.status < 0:
            return f"killed by signal {-self.status}"
        reason = f": {self.last_line}" if self.status == CANNOT_START else ""
        return f"status {self.status}{reason}"


class Restarts:
    """Counts the failed starts of one service; the delay doubles with each one in a row."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._num_same = 0
        self._reason = ""
        self._names_reason = False

    def delay_after(self, ended: Exit) -> float:
        """Seconds to wait before the next start."""
        if not ended.failed_to_start:
            self._num_failed = self._num_same = 0
            self._names_reason = False
            return 0.0
        self._num_failed += 1
        self._names_reason = ended.status == CANNOT_START
        reason = _without_numbers(ended.last_line)
        self._num_same = self._num_same + 1 if reason == self._reason else 1
        self._reason = reason
        return float(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (self._num_failed - 1)))

    @property
    def hopeless(self) -> bool:
        """Whether another start will not help, because the service gives a reason why it cannot
        start, or repeatedly fails in the same way. A service itself waits for what may still come,
        such as Redis."""
        return self._names_reason or self._num_same >= MAX_SAME_FAILURES


def _without_numbers(line: str) -> str:
    """The line without its numbers: times and memory sizes differ between starts, although the
    reason is the same."""
    return re.sub(r"\d+", "#", line)
