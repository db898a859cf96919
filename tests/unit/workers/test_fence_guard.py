"""A worker that was given up while it was stopped neither writes nor answers."""

from pathlib import Path

import pytest

from blockstore.errors import WorkerFenced
from services.common.pool.locks import WorkerLock, revoke_lock
from services.worker.liveness.fence_guard import FenceGuard


@pytest.fixture
def lock(tmp_path: Path) -> WorkerLock:
    return WorkerLock.create(tmp_path / "decode-1.lock")


def test_copies_check_the_locks_of_all_pools(lock: WorkerLock, tmp_path: Path) -> None:
    swap_pool = WorkerLock.create(tmp_path / "colder.lock")
    copied: list[tuple[int, int]] = []
    copy = FenceGuard([lock, swap_pool]).guard_copy(copied.extend)
    copy([(1, 2)])
    revoke_lock(swap_pool.path)
    with pytest.raises(WorkerFenced):
        copy([(3, 4)])
    assert copied == [(1, 2)]


def test_a_worker_that_is_gone_cannot_be_given_up(tmp_path: Path) -> None:
    revoke_lock(tmp_path / "nobody.lock")
    assert list(tmp_path.iterdir()) == []
