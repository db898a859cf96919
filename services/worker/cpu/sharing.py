"""Runs the forward pass on its worker's part of the host's CPUs.

The CPUs are divided again whenever a worker joins or leaves.
"""

import time
from collections.abc import Callable, Sequence

import torch

from kvops.native import Lane, NativeCpu, wake
from services.engine.batch import Row, Wait
from services.engine.forward import Flight
from services.engine.runner import Runner
from services.runtime.logging import get_logger
from services.runtime.numa.topology import HostCpus
from services.worker.cpu.board import ENTRY_WORDS, CpuBoard, CpuBoardEntry
from services.worker.cpu.division import lanes, pause_s

_NOTICE_S = 0.001
"""How long before its next step decode announces that it needs its CPUs; a borrowing lane leaves
within this time. Otherwise the two would share the CPU for a time slice of the operating system,
and the borrower's other lanes would wait for it."""

log = get_logger(__name__)


class SharedCpus:
    """A forward pass that shares CPUs with the other workers of the host.

    Any thread may call `refresh`; only the engine thread calls the other methods. A new division
    takes effect with the next step. `max_gap_s` is the time from the start of one decode step to
    the next while prompts wait, unless the step alone takes longer; None is as `pause_s` says.
    """

    def __init__(
        self,
        runner: Runner,
        native: NativeCpu,
        cpu_board: CpuBoard,
        own: CpuBoardEntry,
        host: HostCpus,
        max_gap_s: float | None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner = runner
        self._native = native
        self._cpu_board = cpu_board
        self._own = own
        self._host = host
        self._max_gap_s = max_gap_s
        self._words = torch.frombuffer(cpu_board.memory, dtype=torch.int32)
        self._sleep = sleep
        self._num_decoding = 0
        self._step_s = self._drafting_s = 0.0
        self._entries: tuple[CpuBoardEntry, ...] = ()
        self._wanted: tuple[Lane, ...] | None = None
        self.refresh()

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Flight:
        self._begin(len(rows))
        began = time.perf_counter()
        flight = self._runner.launch(rows, copies)
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        self._num_decoding, self._step_s = len(rows), drafting_s + time.perf_counter() - began
        return flight

    def launch_on(self, draft_runner: Runner) -> Callable[[Sequence[Row]], Flight]:
        """The launches of a draft model, which computes on the same CPUs before steps. Its time
        counts as the next step's."""

        def launch(rows: Sequence[Row]) -> Flight:
            self._begin(len(rows))
            began = time.perf_counter()
            flight = draft_runner.launch(rows)
            self._drafting_s += time.perf_counter() - began
            return flight

        return launch

    def _begin(self, backlog: int) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._native.assign(wanted, self._words)
        self._cpu_board.set_backlog(backlog)

    def yield_device(self, wait: Wait) -> None:
        """Pause decode while prompts wait, so that its CPUs compute them. Prefill never pauses."""
        if self._own.role != "decode":
            return
        prefill = (entry for entry in self._entries if entry.role != "decode")
        if not any(self._cpu_board.backlog(entry) for entry in prefill):
            return
        lent_s = pause_s(self._step_s, self._max_gap_s) - _NOTICE_S
        if lent_s < _NOTICE_S:
            return
        self.on_idle()
        wait(lent_s)
        self._cpu_board.set_backlog(self._num_decoding)
        self._sleep(_NOTICE_S)

    def on_idle(self) -> None:
        self._cpu_board.set_backlog(0)
        wake(self._words, self._own.index * ENTRY_WORDS)

    def change_role(self, role: str) -> None:
        """Take the part of a worker of this role. No step may be in flight."""
        if role != self._own.role:
            self._own = self._cpu_board.change_role(role)
            self.refresh()

    def refresh(self) -> None:
        """Divide the CPUs again if a worker joined, left or changed its role."""
        entries = self._cpu_board.entries()
        if entries == self._entries:
            return
        self._entries = entries
        self._wanted = lanes(self._host, entries, self._own)
        log.info(
            "cpus_divided",
            cpus=[lane.cpu for lane in self._wanted if not lane.owners],
            borrowed=[lane.cpu for lane in self._wanted if lane.owners],
            nodes=list(self._own.nodes),
            num_workers=len(entries),
        )
