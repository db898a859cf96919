"""Signal handlers for the time in which a service imports its modules.

The first process of a container ignores signals without a handler, and the imports of a service
take seconds. So `__main__` installs these handlers first; `run_service` replaces them later.
"""

import os
import signal
from types import FrameType
from typing import NoReturn


def end_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process at once, with the exit status of a normal stop: it has
    acquired nothing yet that it would have to release."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _end)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)
