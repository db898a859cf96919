"""A worker that was given up while it was stopped neither writes nor answers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from blockstore.errors import WorkerFenced
from services.common.pool.locks import WorkerLock, revoke_lock
from services.engine.batch import Row, Wait
from services.engine.forward import CompleteFlight
from services.worker.liveness.fence_guard import FenceGuard, GuardedForward
from tests.late_device import LateForward


class Forward:
    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.num_runs = 0
        self._meanwhile = meanwhile

    def launch(
        self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = (), num_waiting: int = 0
    ) -> CompleteFlight:
        self.num_runs += 1
        self._meanwhile()
        return CompleteFlight()

    def yield_device(self, wait: Wait) -> None:
        pass

    def on_idle(self) -> None:
        pass


@pytest.fixture
def lock(tmp_path: Path) -> WorkerLock:
    return WorkerLock.create(tmp_path / "decode-1.lock")


def test_a_fenced_worker_neither_writes_nor_copies(lock: WorkerLock) -> None:
    forward = Forward()
    permitted = GuardedForward(forward, FenceGuard([lock]))
    permitted.launch((), [(1, 2)]).result()
    revoke_lock(lock.path)
    with pytest.raises(WorkerFenced):
        permitted.launch((), [(1, 2)])
    assert forward.num_runs == 1


def test_results_computed_meanwhile_are_dropped(lock: WorkerLock) -> None:
    """The blocks that it read may have belonged to another holder by then."""
    permitted = GuardedForward(Forward(lambda: revoke_lock(lock.path)), FenceGuard([lock]))
    flight = permitted.launch(())
    with pytest.raises(WorkerFenced):
        flight.result()


def test_a_fenced_worker_waits_for_what_it_has_launched(lock: WorkerLock) -> None:
    """The device writes until then, whatever happens to the results."""
    forward = Forward()
    flight = GuardedForward(LateForward(forward), FenceGuard([lock])).launch((), [(1, 2)])
    revoke_lock(lock.path)
    assert not flight.is_complete
    with pytest.raises(WorkerFenced):
        flight.result()
    assert flight.is_complete
    assert forward.num_runs == 1


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
