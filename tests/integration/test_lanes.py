"""A worker on its part of the host's CPUs, with real neighbours on the board and real lanes."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from kvops.native import Lane, NativeCpu
from services.common.board import SEAT_BYTES, Board, Seat
from services.engine.batch import Row
from services.engine.runner import Runner
from services.worker.lanes import SharedCpus

from .board_guest import Guest, guest

CPUS = (0, 1)


class RecordingCpu(NativeCpu):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Lane, ...]] = []

    def assign(self, lanes: Sequence[Lane], board: Tensor | None = None) -> None:
        super().assign(lanes, board)
        self.told.append(tuple(lanes))


class Linear:
    """A runner whose step is one linear; it notes whether the board said that it was busy."""

    def __init__(self, native: NativeCpu) -> None:
        self._native = native
        self._x = torch.randn(8, 512)
        self._weights = native.pack("float32", torch.randn(1024, 512))
        self.expected = self._product()
        self.was_busy: list[int] = []
        self.board: Board | None = None

    def run(self, rows: Sequence[Row]) -> list[int | None]:
        assert self.board is not None
        self.was_busy.append(self.board.memory[0])
        assert torch.equal(self._product(), self.expected)
        return [len(rows)]

    def _product(self) -> Tensor:
        out = torch.empty(8, 1024)
        self._native.ops.linear(self._x, self._weights, out)
        return out


class Worker:
    """The decode worker in seat 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.native = RecordingCpu()
        self.linear = Linear(self.native)
        self.board = self.linear.board = Board(path)
        self.own = self.board.sit_down("decode", "own")
        runner = cast(Runner, self.linear)
        self.cpus = SharedCpus(runner, self.native, self.board, self.own, CPUS)

    def busy(self, seat: Seat | None = None) -> int:
        return self.board.memory[(seat or self.own).index * SEAT_BYTES]

    def division(self, *guests: Guest) -> tuple[Lane, ...]:
        """What a step is computed on when it has looked around, with these guests on the board."""
        assert self.board.seats() == tuple(sorted([self.own, *(g.seat for g in guests)]))
        self.cpus.refresh()
        self.cpus.run([])
        return self.native.told[-1]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """This thread computes its first lane, and is bound to that lane's CPU until the test ends."""
    usable = os.sched_getaffinity(0)
    worker = Worker(tmp_path / "board")
    yield worker
    worker.board.leave()
    os.sched_setaffinity(0, usable)


ALONE = (Lane(0), Lane(1))
BESIDE_PREFILL = (Lane(0), Lane(1, (SEAT_BYTES,)))  # a prefill worker in seat 1


def test_who_is_alone_has_all_cpus_from_the_first_step_on(worker: Worker) -> None:
    assert worker.native.told == []
    assert worker.cpus.run([]) == [0]
    assert worker.native.told == [ALONE]
    assert worker.native.num_lanes == 2


def test_a_division_stays_while_nobody_comes_or_goes(worker: Worker) -> None:
    for _ in range(3):
        worker.cpus.refresh()
        worker.cpus.run([])
    assert worker.native.told == [ALONE]


def test_cpus_are_divided_anew_when_a_worker_comes_and_when_it_leaves(worker: Worker) -> None:
    with guest(worker.path, "prefill", "p1") as prefill:
        assert worker.division(prefill) == BESIDE_PREFILL
        with guest(worker.path, "decode", "z2") as decode:  # behind us by name, first for CPU 1
            assert worker.division(prefill, decode) == (Lane(0), Lane(1, (64, 128)))
            decode.leave()
        assert worker.division(prefill) == BESIDE_PREFILL
        prefill.leave()
        assert worker.division() == ALONE


def test_a_killed_workers_cpus_go_to_the_others(worker: Worker) -> None:
    """Busy when it died: nobody waits for it to become idle."""
    with guest(worker.path, "prefill", "p1") as prefill:
        assert worker.division(prefill) == BESIDE_PREFILL
        prefill.set_busy(True)
        prefill.kill()
        assert worker.division() == ALONE
        assert worker.busy(prefill.seat) == 0


def test_a_division_takes_effect_with_the_next_step(worker: Worker) -> None:
    worker.cpus.run([])
    with guest(worker.path, "prefill", "p1"):
        worker.cpus.refresh()
        assert worker.native.told == [ALONE]
        worker.cpus.run([])
        assert worker.native.told == [ALONE, BESIDE_PREFILL]


def test_of_two_divisions_between_steps_the_last_one_counts(worker: Worker) -> None:
    worker.cpus.run([])
    with guest(worker.path, "prefill", "p1") as prefill:
        worker.cpus.refresh()
        prefill.leave()
        worker.cpus.refresh()
        worker.cpus.run([])
    assert worker.native.told == [ALONE, ALONE]


def test_a_worker_is_busy_from_its_first_step_until_it_rests(worker: Worker) -> None:
    assert worker.busy() == 0
    worker.cpus.run([])
    assert worker.busy() == 1
    worker.cpus.run([])
    worker.cpus.rest()
    assert worker.busy() == 0
    worker.cpus.run([])
    assert worker.linear.was_busy == [1, 1, 1]


def test_a_lent_lane_follows_the_other_process(worker: Worker) -> None:
    """While it is busy and while it is not, steps compute the same."""
    with guest(worker.path, "prefill", "p1") as prefill:
        worker.division(prefill)
        for busy in (True, False, True):
            prefill.set_busy(busy)
            assert worker.busy(prefill.seat) == busy
            for _ in range(20):
                worker.cpus.run([])
