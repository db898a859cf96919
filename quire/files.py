"""Reads and replaces small files, locks directories, and names models by their files."""

import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError if it cannot be opened, or is a device or a FIFO,
    whose reading may wait for ever or have no end."""

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer

    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError as `open_regular_file` does, or if the
    file is larger."""
    with open_regular_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        text = f"larger than {max_bytes:,} bytes, the most that Quire reads of such a file"
        raise OSError(errno.EFBIG, text, str(path))
    return content


def version_of(*files: Path) -> tuple[tuple[int, int, int], ...] | None:
    """Changes whenever one of the files does; None if one is missing."""
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file. Its readers see the old content or all of the new one. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a process that was killed: its mode may be another
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    draft.replace(path)


def try_lock(directory: Path) -> int | None:
    """Lock a directory of this user until the returned descriptor is closed, or the process ends.
    Returns None if another process has the lock, or the directory is gone or another user's."""
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
    """The default name of a model for clients, by its directory, its GGUF file, or the link to one,
    whose target may change. If the model is in several files, `path` is the first of them:
    `NAME-00001-of-00003.gguf`."""
    path = Path(os.path.abspath(path))
    if path.suffix != ".gguf":
        return path.name
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
