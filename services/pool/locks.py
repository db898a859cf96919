"""Lock files that show which workers live: each is flocked from before its name exists until the
worker's process is gone.

The kernel drops a lock when the last descriptor of its holder is closed, however the process dies.
At that time the process's memory is unmapped, so no write can follow. This works across containers
that mount the directory. So a process that gets a worker's lock knows that the worker is dead.
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
    """An exclusive flock on a file, held by this process until `close` or the process's death.

    A program started by exec does not inherit the descriptor (O_CLOEXEC), and a forked child closes
    it: otherwise the child would keep the lock of a dead parent.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd
        _held.add(self)

    @classmethod
    def create(cls, path: Path) -> "WorkerLock":
        """Create a file that is locked before it gets its name, so no process ever sees it
        unlocked. Raises FileExistsError if the name exists."""
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
    def is_revoked(self) -> bool:
        """Whether a process has called `revoke_lock` for this worker."""
        return self._fd is not None and os.fstat(self._fd).st_size > 0

    @property
    def is_unlinked(self) -> bool:
        """Whether the file has lost its name: the worker has left, or was reaped."""
        return self._fd is None or os.fstat(self._fd).st_nlink == 0

    def fileno(self) -> int:
        """The descriptor, to be duplicated into other processes of the same worker: the lock is
        held until all of them have closed it. Raises ValueError after `close`."""
        if self._fd is None:
            raise ValueError(f"{self.path} is not locked any more")
        return self._fd

    def unlink(self) -> None:
        """Remove the file's name. The caller holds the lock, and the worker is off the pool."""
        if self._fd is None:
            raise ValueError(f"{self.path} is not locked any more")
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop the lock. May be called again."""
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
    """Whether a process holds the lock now; False if the file does not exist."""
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that two processes that ask at once do not see each other as holders.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def revoke_lock(path: Path) -> None:
    """Mark a worker's lock file as revoked: from now on the worker may write no blocks. The worker
    checks the mark after it stamps blocks as its own and before it writes into them. No error if
    the worker is gone."""
    with suppress(FileNotFoundError):
        os.truncate(path, 1)


async def wait_until_dropped(path: Path) -> WorkerLock:
    """Wait until a worker is dead and return its lock, which the caller then holds.

    A thread blocks in flock, so this returns within milliseconds of the death. If the lock
    `is_unlinked`, nothing is left to reap. Raises FileNotFoundError if the file does not exist.
    """
    return WorkerLock(path, await _flock(os.open(path, _OPEN)))


@asynccontextmanager
async def host_lock(root: Path) -> AsyncIterator[None]:
    """Holds `<root>/host.lock`, so that no other process makes, joins, leaves or removes a pool.
    Creates `root` if it does not exist."""
    path = root / "host.lock"
    _make_parent(path)
    async with file_lock(path):
        yield


def _make_parent(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


@asynccontextmanager
async def file_lock(path: Path) -> AsyncIterator[None]:
    """Holds the exclusive lock of a file. Creates the file if it does not exist."""
    lock = WorkerLock(path, await _flock(os.open(path, _OPEN | os.O_CREAT, 0o600)))
    try:
        yield
    finally:
        lock.close()


async def _flock(fd: int) -> int:
    """Lock `fd` and return it. If the lock is taken, a daemon thread waits for it, which does not
    delay the end of the process. After a cancellation `fd` is closed when that thread returns."""
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
        except RuntimeError:  # the event loop is closed
            os.close(fd)

    threading.Thread(target=block, name=f"flock-{fd}", daemon=True).start()
    try:
        return await locked
    except asyncio.CancelledError:
        if locked.done() and not locked.cancelled():
            os.close(fd)
        raise
