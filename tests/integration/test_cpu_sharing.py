"""A worker on its part of the host's CPUs, with other processes on the board and real lanes."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from kvops.native import Lane, NativeCpu
from services.engine.batch import Row
from services.engine.runner import Runner
from services.runtime.numa.topology import HostCpus, Node
from services.worker.cpu.board import ENTRY_WORDS, CpuBoard, CpuBoardEntry
from services.worker.cpu.sharing import SharedCpus
from tests.late_device import CompleteFlight

from .cpu_board_member import Guest, guest

HOST = HostCpus((Node(0, (0, 1)),), ((0,), (1,)))
MAX_GAP_S = 10.0
ROWS = [Row([1], 0, [0]), Row([2], 0, [1])]


class RecordingCpu(NativeCpu):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Lane, ...]] = []

    def assign(self, lanes: Sequence[Lane], cpu_board: Tensor | None = None) -> None:
        super().assign(lanes, cpu_board)
        self.told.append(tuple(lanes))


class Linear:
    """A runner whose step is one linear; it records what the board says that it wants."""

    def __init__(self, native: NativeCpu) -> None:
        self._native = native
        self._x = torch.randn(8, 512)
        self._weights = native.pack("float32", torch.randn(1024, 512))
        self.expected = self._product()
        self.backlogs: list[int] = []
        self.cpu_board: CpuBoard | None = None

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> CompleteFlight:
        assert self.cpu_board is not None
        self.backlogs.append(self.cpu_board.backlog(self.cpu_board.entries()[0]))
        assert torch.equal(self._product(), self.expected)
        return CompleteFlight([(len(rows),)])

    def _product(self) -> Tensor:
        out = torch.empty(8, 1024)
        self._native.ops.linear(self._x, self._weights, out)
        return out


class Worker:
    """The worker, in seat 0. `pauses`: each pause's length, and what the worker wanted then."""

    def __init__(
        self, path: Path, role: str = "decode", max_gap_s: float | None = MAX_GAP_S
    ) -> None:
        self.path = path
        self.native = RecordingCpu()
        self.linear = Linear(self.native)
        self.cpu_board = self.linear.cpu_board = CpuBoard(path)
        self.own = self.cpu_board.take_entry(role, "own")
        runner = cast(Runner, self.linear)
        self.pauses: list[tuple[float, int]] = []
        self.cpus = SharedCpus(
            runner, self.native, self.cpu_board, self.own, HOST, max_gap_s, self.pause
        )

    def pause(self, pause_s: float) -> None:
        self.pauses.append((pause_s, self.backlog()))

    def backlog(self, entry: CpuBoardEntry | None = None) -> int:
        return self.cpu_board.backlog(entry or self.own)

    def division(self, *guests: Guest) -> tuple[Lane, ...]:
        """The CPUs that the worker computes a step on, with these other workers on the board."""
        assert self.cpu_board.entries() == tuple(sorted([self.own, *(g.entry for g in guests)]))
        self.cpus.refresh()
        self.cpus.launch(ROWS)
        return self.native.told[-1]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """This thread computes the first lane, and is bound to its CPU until the test ends."""
    usable = os.sched_getaffinity(0)
    worker = Worker(tmp_path / "board")
    yield worker
    worker.cpu_board.leave()
    os.sched_setaffinity(0, usable)


ALONE = (Lane(0), Lane(1))
BESIDE_PREFILL = (Lane(0), Lane(1, (ENTRY_WORDS,)))  # a prefill worker in seat 1


def test_a_single_worker_has_all_cpus_from_the_first_step(worker: Worker) -> None:
    assert worker.native.told == []
    assert worker.cpus.launch(ROWS).result() == [(2,)]
    assert worker.native.told == [ALONE]
    assert worker.native.num_lanes == 2


def test_a_division_stays_while_no_worker_joins_or_leaves(worker: Worker) -> None:
    for _ in range(3):
        worker.cpus.refresh()
        worker.cpus.launch(ROWS)
    assert worker.native.told == [ALONE]


def test_cpus_are_divided_anew_when_a_worker_comes_and_when_it_leaves(worker: Worker) -> None:
    with guest(worker.path, "prefill", "p1") as prefill:
        assert worker.division(prefill) == BESIDE_PREFILL
        with guest(worker.path, "decode", "z2") as decode:  # behind us by name, first for CPU 1
            assert worker.division(prefill, decode) == (Lane(0), Lane(1, (16, 32)))
            decode.leave()
        assert worker.division(prefill) == BESIDE_PREFILL
        prefill.leave()
        assert worker.division() == ALONE


def test_a_killed_workers_cpus_go_to_the_others(worker: Worker) -> None:
    """The worker was busy when it died: no other one waits for it to become idle."""
    with guest(worker.path, "prefill", "p1") as prefill:
        assert worker.division(prefill) == BESIDE_PREFILL
        prefill.set_backlog(1)
        prefill.kill()
        assert worker.division() == ALONE
        assert worker.backlog(prefill.entry) == 0


def test_a_division_takes_effect_with_the_next_step(worker: Worker) -> None:
    worker.cpus.launch(ROWS)
    with guest(worker.path, "prefill", "p1"):
        worker.cpus.refresh()
        assert worker.native.told == [ALONE]
        worker.cpus.launch(ROWS)
        assert worker.native.told == [ALONE, BESIDE_PREFILL]


def test_the_last_of_two_divisions_between_steps_counts(worker: Worker) -> None:
    worker.cpus.launch(ROWS)
    with guest(worker.path, "prefill", "p1") as prefill:
        worker.cpus.refresh()
        prefill.leave()
        worker.cpus.refresh()
        worker.cpus.launch(ROWS)
    assert worker.native.told == [ALONE, ALONE]


def test_a_worker_reports_its_backlog_until_it_is_idle(worker: Worker) -> None:
    assert worker.backlog() == 0
    worker.cpus.launch(ROWS)
    assert worker.backlog() == 2
    worker.cpus.launch(ROWS[:1])
    worker.cpus.on_idle()
    assert worker.backlog() == 0
    worker.cpus.launch(ROWS)
    assert worker.linear.backlogs == [2, 1, 2]


def test_decoding_pauses_while_prompts_wait_and_wants_nothing_meanwhile(worker: Worker) -> None:
    with guest(worker.path, "prefill", "p1") as prefill:
        prefill.set_backlog(1)
        worker.division(prefill)
        worker.cpus.yield_device(worker.pause)
        (lent_s, backlog), (notice_s, backlog_then) = worker.pauses
        assert MAX_GAP_S / 2 < lent_s + notice_s < MAX_GAP_S  # the step takes some of the gap
        assert (backlog, backlog_then) == (0, 2)


@pytest.mark.parametrize("max_gap_s", [0.0, 0.001, None])
def test_a_pause_too_short_to_be_useful_is_skipped(tmp_path: Path, max_gap_s: float | None) -> None:
    """A step takes no millisecond here, so that a gap of two steps is as short."""
    worker = Worker(tmp_path / "board", max_gap_s=max_gap_s)
    with guest(worker.path, "prefill", "p1") as prefill:
        prefill.set_backlog(1)
        worker.division(prefill)
        worker.cpus.yield_device(worker.pause)
        assert worker.pauses == []
    worker.cpu_board.leave()


def test_decoding_never_pauses_while_no_prompt_waits(worker: Worker) -> None:
    with guest(worker.path, "prefill", "p1") as prefill:
        worker.division(prefill)
        worker.cpus.yield_device(worker.pause)
        assert worker.pauses == []
        assert worker.backlog() == 2


def test_prefill_never_pauses(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "board", role="prefill")
    with guest(worker.path, "decode", "d1") as decode:
        decode.set_backlog(6)
        worker.cpus.refresh()
        worker.cpus.launch(ROWS)
        worker.cpus.yield_device(worker.pause)
        assert worker.pauses == []
    worker.cpu_board.leave()


def test_a_lent_lane_follows_the_other_process(worker: Worker) -> None:
    """The steps compute the same whether the other process has work or not."""
    with guest(worker.path, "prefill", "p1") as prefill:
        worker.division(prefill)
        for backlog in (1, 0, 4):
            prefill.set_backlog(backlog)
            assert worker.backlog(prefill.entry) == backlog
            for _ in range(20):
                worker.cpus.launch(ROWS)
