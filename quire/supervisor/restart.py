"""When a service that has ended is started again, and when not.

See ADR 6.
"""

import re
from dataclasses import dataclass

CANNOT_START = 2
"""Exit status of a service that names a reason why it cannot start."""
MAX_SAME_FAILURES = 2
"""Of a service that names no reason."""
STEADY_S = 10.0
"""Who lived this long had started well."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Exit:
    """`status` is negative for a signal; `last_line` is the last that the service wrote."""

    status: int
    lived_s: float
    last_line: str

    @property
    def failed_to_start(self) -> bool:
        return self.status == CANNOT_START or self.lived_s < STEADY_S

    def __str__(self) -> str:
        """With the reason where the service named one; a fault's log has been passed on."""
        if self.status < 0:
            return f"killed by signal {-self.status}"
        reason = f": {self.last_line}" if self.status == CANNOT_START else ""
        return f"status {self.status}{reason}"


class Restarts:
    """The failures of one service. The delay doubles with every failed start in a row."""

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
        """Trying again does not help: the service names a reason why it cannot start (it has waited
        by itself for what may come, such as Redis), or fails in the same way again and again."""
        return self._names_reason or self._num_same >= MAX_SAME_FAILURES


def _without_numbers(line: str) -> str:
    """The reason itself: how much memory is free, what time it is, differ from start to start."""
    return re.sub(r"\d+", "#", line)
