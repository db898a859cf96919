"""Worker locks with real processes: the kernel shows which process lives, however it dies."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.pool.locks import WorkerLock, host_lock, is_held, wait_until_dropped

LIMIT_S = 10.0
HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from services.pool.locks import WorkerLock

lock = WorkerLock.create(Path(sys.argv[1]))
child = 0
if sys.argv[2] == "exec":
    child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        time.sleep(600)
print(child, flush=True)
sys.stdin.read()
"""

Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decode-1.lock"


@pytest.fixture
def hold(path: Path) -> Iterator[Hold]:
    """Starts a process that holds the lock; `child`: it starts another process. Both end with the
    test."""
    pids = []

    def hold(child: str = "none") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        pids.append(process)
        assert process.stdout is not None
        if child_pid := int(process.stdout.readline()):
            children.append(child_pid)
        return process

    children: list[int] = []
    yield hold
    for child_pid in children:
        os.kill(child_pid, signal.SIGKILL)
    for process in pids:
        process.kill()
        process.communicate()


async def test_a_killed_workers_lock_is_had_at_once(hold: Hold, path: Path) -> None:
    worker = hold()
    assert is_held(path)
    waiting = asyncio.create_task(wait_until_dropped(path))
    await asyncio.sleep(0)
    assert not waiting.done()
    loop = asyncio.get_running_loop()
    killed_at = loop.time()
    worker.kill()
    async with asyncio.timeout(LIMIT_S):
        lock = await waiting
    assert loop.time() - killed_at < 0.5  # Milliseconds, on a machine that has time for us.
    assert not lock.is_unlinked
    assert is_held(path)
    lock.unlink()
    assert lock.is_unlinked
    lock.close()
    assert not is_held(path)


async def test_a_stopped_worker_is_alive(hold: Hold, path: Path) -> None:
    worker = hold()
    worker.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(wait_until_dropped(path))
    _, pending = await asyncio.wait([waiting], timeout=0.2)
    assert pending
    assert is_held(path)
    worker.kill()
    async with asyncio.timeout(LIMIT_S):
        (await waiting).close()


@pytest.mark.parametrize("child", ["exec", "fork"])
async def test_a_child_that_outlives_the_worker_does_not_keep_its_lock(
    hold: Hold, path: Path, child: str
) -> None:
    worker = hold(child)
    assert is_held(path)
    worker.kill()
    async with asyncio.timeout(LIMIT_S):
        (await wait_until_dropped(path)).close()


async def test_the_lock_of_a_worker_that_left_is_unlinked(path: Path) -> None:
    """A process that waited for it finds nothing to reap."""
    worker = WorkerLock.create(path)
    waiting = asyncio.create_task(wait_until_dropped(path))
    await asyncio.sleep(0)
    worker.unlink()
    worker.close()
    async with asyncio.timeout(LIMIT_S):
        lock = await waiting
    assert lock.is_unlinked
    lock.close()
    with pytest.raises(FileNotFoundError):
        await wait_until_dropped(path)


def test_a_name_is_used_once(path: Path) -> None:
    lock = WorkerLock.create(path)
    with pytest.raises(FileExistsError):
        WorkerLock.create(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["decode-1.lock"]
    assert path.stat().st_mode & 0o777 == 0o600
    lock.close()
    lock.close()


def test_a_lock_file_is_never_seen_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name appears after the flock: a watcher cannot consider a new worker dead."""
    seen_before_flock = []
    flock = fcntl.flock

    def spy(fd: int, operation: int) -> None:
        seen_before_flock.append(path.exists())
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", spy)
    lock = WorkerLock.create(path)
    assert seen_before_flock == [False]
    monkeypatch.undo()
    assert is_held(path)
    lock.close()


async def test_the_hosts_lock_is_one_at_a_time(tmp_path: Path) -> None:
    inside = asyncio.Event()

    async def enter() -> None:
        async with host_lock(tmp_path / "root"):
            inside.set()

    async with host_lock(tmp_path / "root"):
        second = asyncio.create_task(enter())
        _, pending = await asyncio.wait([second], timeout=0.1)
        assert pending
        assert not inside.is_set()
    async with asyncio.timeout(LIMIT_S):
        await second
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700


async def test_a_waiter_that_gave_up_does_not_get_the_lock_later(path: Path) -> None:
    holder = WorkerLock.create(path)
    waiting = asyncio.create_task(wait_until_dropped(path))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    holder.close()
    async with asyncio.timeout(LIMIT_S):
        (await wait_until_dropped(path)).close()
        (await wait_until_dropped(path)).close()
