"""The directory of an offline deployment's pool, in shared memory.

A deployment removes its directory as soon as its workers have opened the pool's files. A process
that is killed before leaves its directory, with the pool's memory; the next deployment removes it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.files import try_lock

_PREFIX = "quire-llm-"


@contextmanager
def locked_folder(root: Path) -> Iterator[Path]:
    """A new directory in `root` until the block is left, or the caller removes it. Removes those of
    dead processes."""
    _remove_dead(root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = try_lock(folder)
        if lock is not None and folder.exists():  # no other process took it for a dead one's
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the caller may have removed it
        os.close(lock)


def _remove_dead(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        lock = try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
