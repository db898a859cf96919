"""Makes the files of a pool, which have a fixed size, and allocates their memory before it is used.

/dev/shm accepts a sparse file of any size; a process that later touches a page without memory gets
SIGBUS. But the kernel needs 0.3 s to allocate 1 GiB. So workers serve as soon as the front of a
file is allocated, and allocate the rest while they work:

    0             FIRST_BYTES                                 size
    |-- make_file --|-- complete_file, from front to back ------|
    |- blocks in use, from 0 up ->

The store hands out block ids from 0 up, and a step of the model, which fills a block, takes far
longer than the allocation of a block. So allocation stays ahead of use. The kernel clears a page at
the first write to it, which costs a tenth of mapping it.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from services.pool.sizing import format_size
from services.runtime.errors import StartupError
from services.runtime.numa.policy import InterleavePolicy

FIRST_BYTES = 256 << 20
_PIECE_BYTES = 16 << 20

# Not os.posix_fallocate: if the file system cannot allocate, it reads and rewrites a byte of every
# page, and so loses what another process writes meanwhile.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


def make_file(path: Path, num_bytes: int, policy: InterleavePolicy | None = None) -> None:
    """Make the file `path` with `num_bytes` zero bytes, and allocate its first FIRST_BYTES.

    `policy` interleaves the pages of the whole file; without it, a page is on the node of the
    thread that allocates it.

    Raises StartupError if the file system has too little space, and then removes the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if num_bytes > _free_bytes(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, num_bytes)
        if policy is not None:
            policy.interleave_file(fd, num_bytes)
        _allocate(fd, 0, min(num_bytes, FIRST_BYTES))
    except OSError as error:
        path.unlink()
        raise StartupError(_refusal(path, num_bytes, error)) from error
    finally:
        os.close(fd)


def complete_file(path: Path, is_stopped: Callable[[], bool]) -> None:
    """Allocate the rest of the file in pieces, until `is_stopped` returns true.

    Other processes may use the file meanwhile, or complete it too: allocated pieces stay as they
    are, so a process can continue what another one began. Raises StartupError if the file system
    has too little space left.
    """
    num_bytes = path.stat().st_size
    try:
        with path.open("r+b", buffering=0) as file:
            for start in range(FIRST_BYTES, num_bytes, _PIECE_BYTES):
                if is_stopped():
                    return
                _allocate(file.fileno(), start, min(_PIECE_BYTES, num_bytes - start))
    except OSError as error:
        raise StartupError(_refusal(path, num_bytes, error)) from error


def missing_bytes(path: Path) -> int:
    """The bytes of the file that are not yet allocated."""
    status = path.stat()
    return max(0, status.st_size - status.st_blocks * 512)


def _allocate(fd: int, start: int, num_bytes: int) -> None:
    """Allocate a range of the file. Raises OSError without space, or if allocation is refused."""
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
