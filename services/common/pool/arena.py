"""The files of a pool: of fixed size, their memory allocated before it is used.

A sparse file in /dev/shm would be granted at any size and kill its user with SIGBUS later. But to
allocate an arena takes the kernel 0.3 s a GiB, so workers serve as soon as its front is there, and
allocate the rest beside their work:

    0             FIRST_BYTES                                 size
    |-- make_file --|-- complete_file, from front to back ------|
    |- blocks in use, from 0 up ->

Block ids are given from 0 up, and to fill a block takes a step of the model, far longer than to
allocate it: use stays behind. Pages are cleared when they are first written, which costs a tenth of
mapping them.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from services.common.errors import StartupError
from services.common.pool.sizing import format_size

FIRST_BYTES = 256 << 20
_PIECE_BYTES = 16 << 20

# Not os.posix_fallocate: where a file system cannot allocate, that reads and writes back a byte of
# every page, and what another process writes meanwhile is lost.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


def make_file(path: Path, num_bytes: int) -> None:
    """Make `path` with `num_bytes` zero bytes, the first FIRST_BYTES of them in memory.
    StartupError: the file system has not as many; then the file is gone again."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if num_bytes > _free_bytes(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, num_bytes)
        _allocate(fd, 0, min(num_bytes, FIRST_BYTES))
    except OSError as error:
        path.unlink()
        raise StartupError(_refusal(path, num_bytes, error)) from error
    finally:
        os.close(fd)


def complete_file(path: Path, is_stopped: Callable[[], bool]) -> None:
    """Allocate the rest, piece by piece, until `is_stopped`. Beside anybody who uses the file or
    completes it too: what is there already is passed over, so that any process can go on with what
    another one began. StartupError: the memory is not there any more."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    num_bytes = os.fstat(fd).st_size
    try:
        for start in range(FIRST_BYTES, num_bytes, _PIECE_BYTES):
            if is_stopped():
                return
            _allocate(fd, start, min(_PIECE_BYTES, num_bytes - start))
    except OSError as error:
        raise StartupError(_refusal(path, num_bytes, error)) from error
    finally:
        os.close(fd)


def missing_bytes(path: Path) -> int:
    """What is still to be allocated of the file."""
    status = path.stat()
    return max(0, status.st_size - status.st_blocks * 512)


def _allocate(fd: int, start: int, num_bytes: int) -> None:
    """OSError: there is no room, or the file system cannot allocate."""
    while _fallocate(fd, 0, start, num_bytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _free_bytes(path: Path) -> int:
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize


def _refusal(path: Path, num_bytes: int, error: OSError) -> str:
    return (
        f"cannot have {format_size(num_bytes)} for {path}: {error.strerror}; "
        f"the file system has {format_size(_free_bytes(path))} free"
    )
