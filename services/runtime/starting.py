"""Prepares a process for its imports: signal handlers, and no garbage collection.

The first process of a container ignores signals without a handler, and the imports of a service
take seconds. So `__main__` calls `begin_start` before all other imports; `run_service` replaces the
signal handlers later.
"""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def begin_start() -> None:
    """Let SIGTERM and SIGINT end the process at once, with the exit status of a normal stop: it has
    acquired nothing yet that it would have to release. Collect no garbage until `end_imports`."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _end)
    gc.disable()


def end_imports() -> None:
    """Collect garbage from now on, but never visit the objects that exist now."""
    gc.freeze()
    gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage during imports that are made later.

    Imports make a million objects and hardly any garbage: the collections take an eighth of the
    time of a worker's imports.
    """
    gc.disable()
    try:
        yield
    finally:
        end_imports()


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)
