"""Replaces files in one step, locks directories, and names models by their files."""

import fcntl
import os
import re
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, whose readers see the old content or all of the new. OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a process that was killed: its mode may be another
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    draft.replace(path)


def try_lock(directory: Path) -> int | None:
    """Locks a directory of this user until the returned descriptor is closed, or the process ends.
    None: another process has the lock, or the directory is gone or is another user's."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
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


def default_name(path: Path) -> str:
    """The default name of a model for clients, by its directory or GGUF file. If the model is in
    several files, `path` is the first of them: `NAME-00001-of-00003.gguf`."""
    if path.suffix != ".gguf":
        return path.name
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
