"""The directory of an offline deployment's pool, in shared memory.

A process locks its directory while it lives. One that is killed leaves its directory, with the
pool's memory; the next deployment removes it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "quire-llm-"


@contextmanager
def locked_folder(root: Path) -> Iterator[Path]:
    """A new directory in `root` until the block is left. Removes those of dead processes."""
    _remove_dead(root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = _lock(folder)
        if lock is not None and folder.exists():  # no other process took it for a dead one's
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _remove_dead(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """The lock of a directory; None: a living process has it, the directory is gone, or it belongs
    to another user."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None
