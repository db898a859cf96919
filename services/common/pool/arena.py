"""Files of fixed size whose memory is really there: allocated and faulted in before use.

A sparse file in /dev/shm would be granted at any size and kill its user with SIGBUS later.
"""

import mmap
import os
from pathlib import Path

from services.common.errors import StartupError
from services.common.pool.sizing import format_size

_PIECE_BYTES = 32 << 20


def make_file(path: Path, num_bytes: int) -> None:
    """Make `path` with `num_bytes` zero bytes in memory. StartupError: they are not there; then
    the file is gone again."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        _fault_in(fd, num_bytes)
    except OSError as error:
        path.unlink()
        raise StartupError(_refusal(path, num_bytes, error)) from error
    finally:
        os.close(fd)


def _fault_in(fd: int, num_bytes: int) -> None:
    """Have the kernel clear every page now, not in the middle of a request. In pieces, since mmap
    keeps the interpreter locked."""
    for start in range(0, num_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, num_bytes - start)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mmap.mmap(fd, length, flags=flags, offset=start).close()


def _refusal(path: Path, num_bytes: int, error: OSError) -> str:
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    return (
        f"cannot have {format_size(num_bytes)} for {path}: {error.strerror}; "
        f"the file system has {format_size(free)} free"
    )
