"""A runner on its worker's part of the host's CPUs, which is divided anew whenever a worker joins
or leaves."""

from collections.abc import Sequence

import torch

from kvops.native import Lane, NativeCpu
from services.common.board import Board, Seat
from services.common.logging import get_logger
from services.engine.batch import Drawn, Row
from services.engine.runner import Runner
from services.worker.cpus import lanes

log = get_logger(__name__)


class SharedCpus:
    """`run` and `rest` are the engine thread's, `refresh` anybody's: a division takes effect with
    the next step."""

    def __init__(
        self, runner: Runner, native: NativeCpu, board: Board, own: Seat, cpus: Sequence[int]
    ) -> None:
        self._runner = runner
        self._native = native
        self._board = board
        self._own = own
        self._cpus = cpus
        self._busy_bytes = torch.frombuffer(board.memory, dtype=torch.uint8)
        self._seats: tuple[Seat, ...] = ()
        self._wanted: tuple[Lane, ...] | None = None
        self.refresh()

    def run(self, rows: Sequence[Row]) -> Sequence[Drawn]:
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._native.assign(wanted, self._busy_bytes)
        self._board.set_busy(True)
        return self._runner.run(rows)

    def rest(self) -> None:
        self._board.set_busy(False)

    def refresh(self) -> None:
        """Divide again if somebody came or went."""
        seats = self._board.seats()
        if seats == self._seats:
            return
        self._seats = seats
        self._wanted = lanes(self._cpus, seats, self._own)
        log.info(
            "cpus_divided",
            cpus=[lane.cpu for lane in self._wanted if not lane.owners],
            borrowed=[lane.cpu for lane in self._wanted if lane.owners],
            num_workers=len(seats),
        )
