"""Who is alive: a worker's lock file is flocked from before it is seen until its process is gone.

The kernel drops the lock when the last descriptor of the holder is closed, however the process
dies, after its memory is unmapped (no write can follow), and across containers that mount the
directory. So whoever gets the lock knows that the worker is dead.
"""

import asyncio
import fcntl
import os
import secrets
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class WorkerLock:
    """An exclusive flock on a file, held by this process until `close` or its death.

    Descriptors are not inherited by exec (O_CLOEXEC) and are closed in forked children, which
    would otherwise keep the lock of a dead parent.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def create(cls, path: Path) -> "WorkerLock":
        """A new file that is locked before it has its name: nobody ever sees it free.
        FileExistsError: the name was used before."""
        unseen = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fd = os.open(unseen, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(unseen, path)
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.unlink(unseen)
        return cls(path, fd)

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called for this worker."""
        return self._fd is not None and os.fstat(self._fd).st_size > 0

    @property
    def is_unlinked(self) -> bool:
        """Whether the file has lost its name: its worker left, or was reaped by another."""
        return self._fd is None or os.fstat(self._fd).st_nlink == 0

    def unlink(self) -> None:
        """Take the name away; only while the lock is held, after the worker is off the pool."""
        if self._fd is None:
            raise ValueError(f"{self.path} is not locked any more")
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go. Again: no error."""
        # Never LOCK_UN: it would unlock for every process that shares the descriptor.
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_held: "weakref.WeakSet[WorkerLock]" = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock now; a file that is not there is not held."""
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who ask at once do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def give_up(path: Path) -> None:
    """Mark a worker, by its lock file, as one that may write nothing any more: it looks between
    stamping blocks as its own and writing into them. A worker that is gone is no error."""
    with suppress(FileNotFoundError):
        os.truncate(path, 1)


async def wait_until_dropped(path: Path) -> WorkerLock:
    """The lock of a worker, as soon as it is dead (within milliseconds: a thread blocks in flock).

    The caller holds it now; `is_unlinked` says that there is nothing left to reap.
    FileNotFoundError: the file is gone already.
    """
    return WorkerLock(path, await _flock(os.open(path, _OPEN)))


@asynccontextmanager
async def host_lock(root: Path) -> AsyncIterator[None]:
    """Hold `<root>/host.lock`: nobody else makes, joins, leaves or removes a pool meanwhile. Makes
    the root if need be."""
    path = root / "host.lock"
    _make_parent(path)
    async with file_lock(path):
        yield


def _make_parent(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


@asynccontextmanager
async def file_lock(path: Path) -> AsyncIterator[None]:
    """Hold the lock of a file, made if need be, which one process at a time can."""
    lock = WorkerLock(path, await _flock(os.open(path, _OPEN | os.O_CREAT, 0o600)))
    try:
        yield
    finally:
        lock.close()


async def _flock(fd: int) -> int:
    """Lock `fd` and return it; waits in a thread of its own, which does not hold up the process's
    end. When cancelled, the descriptor is closed as soon as the thread is back."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return await _flock_in_thread(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


async def _flock_in_thread(fd: int) -> int:
    loop = asyncio.get_running_loop()
    locked: asyncio.Future[int] = loop.create_future()

    def deliver() -> None:
        if locked.cancelled():
            os.close(fd)
        else:
            locked.set_result(fd)

    def block() -> None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # The loop has ended; nobody waits any more.
            os.close(fd)

    threading.Thread(target=block, name=f"flock-{fd}", daemon=True).start()
    try:
        return await locked
    except asyncio.CancelledError:
        if locked.done() and not locked.cancelled():
            os.close(fd)
        raise
