"""Signals of a service that still imports.

The first process of a container ignores signals that it has no handler for, and the imports of a
service take seconds. So `__main__` calls this before them; `run_service` installs its own handlers.
"""

import os
import signal
from types import FrameType
from typing import NoReturn


def end_on_signals() -> None:
    """SIGTERM and SIGINT end the process at once, with the status of a service that was told to
    stop: it has nothing yet that it would have to give back."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _end)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)
