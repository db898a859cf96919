"""Starts the other ranks of a worker, and ends the worker when one of them has ended."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from torch import Tensor

from kvops import Backend
from services.engine.device.gpu_memory import GpuMemoryPlan
from services.engine.device.opening import OpenDevice
from services.engine.models.decoder import ComposedModel
from services.engine.ranks.calls import Peers
from services.engine.ranks.collectives import Collectives
from services.engine.ranks.rank import Rank, ShardPlan
from services.engine.ranks.shared_steps import DividedAdapters, SharedSteps
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import SharedWeights
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.shards import check_shards
from services.pool.layout import PoolLayout
from services.runtime.logging import get_logger
from services.runtime.process import EXIT_FAULT
from services.worker.liveness.step_watch import end_process
from services.worker.membership import Membership
from services.worker.swap.pool import Copy

_LEAVE_LIMIT_S = 5.0
"""How long the other ranks may take to give up their arenas."""

log = get_logger(__name__)


def end_worker(rank: int, status: int) -> None:
    """End this process at once: without rank `rank` no step can be computed, and the worker's locks
    must be dropped soon, so that others continue its requests."""
    log.critical("rank_ended", rank=rank, exit_status=status)
    os._exit(EXIT_FAULT)


class Ranks:
    """The ranks of this worker: rank 0 is this process, which starts the others. They live as long
    as it does, or until it has new weights: a worker that rejoins its pool keeps them.
    """

    gpu_uuids: Sequence[str] = ()
    """The GPUs of the other ranks."""
    adapters: DividedAdapters

    def __init__(
        self,
        size: int,
        log_level: str = "info",
        log_format: str = "json",
        on_end: Callable[[int, int], None] = end_worker,
    ) -> None:
        self.size = size
        self.on_end = on_end
        """The function that a thread calls, with the rank and its exit status, when a rank ends
        before `close`."""
        self._closed = False
        self._collectives: Collectives | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        connections = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            words = str(rank), str(theirs.fileno()), log_level, log_format
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "services.worker.ranks", *words],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            )
            theirs.close()
            connections.append(Connection(ours.detach()))
        self.peers = Peers(connections)
        self._watched = [connection.fileno() for connection in connections]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def load(
        self,
        plan: ShardPlan,
        ops: Backend,
        shared: SharedWeights | None = None,
        progress: Progress = lambda: None,
    ) -> ComposedModel:
        """Load the model's shards, each rank its own, and connect the ranks. Returns rank 0's.

        `ops` and `shared`, the weights if they are shared, are this rank's. `progress` may raise to
        stop. Raises StartupError if the model cannot be divided or loaded.
        """
        check_shards(read_model_config(plan.model), self.size)
        own = Rank(0)
        own.device, own.shared = OpenDevice(plan.devices[0]), shared
        meeting = Path(mkdtemp(prefix="quire-ranks-"))
        plan = replace(plan, meeting=meeting / "store")

        def load_own() -> None:
            own.load_on(plan, ops, progress)
            self.peers.wait(progress)

        try:
            self.gpu_uuids = self.peers.ask("load", plan, meanwhile=load_own)
            self.peers.ask("connect", meanwhile=own.connect)
        finally:
            rmtree(meeting)
        assert own.model.collectives is not None
        self._collectives = own.model.collectives
        self._collectives.tell = self.peers.tell
        self.adapters = DividedAdapters(own.model, self.peers)
        return own.model

    def steps(self, model: ComposedModel, kv: Tensor, block_size: int, ops: Backend) -> SharedSteps:
        """The steps of all ranks, on rank 0's arena `kv`."""
        return SharedSteps(self.peers, model, kv, block_size, ops)

    def measure(self, layout: PoolLayout, own: Callable[[], GpuMemoryPlan]) -> GpuMemoryPlan:
        """The plan of the smallest GPU. `own` measures rank 0, by steps of all ranks. Each of the
        others takes at most as much, since rank 0 has all logits."""
        totals = self.peers.ask("measure", layout)
        plan = own()
        self.peers.ask("leave")
        return replace(plan, total=min(plan.total, *totals))

    def make_memory(self, num_bytes: int) -> Sequence[int]:
        """Let each of the other ranks allocate so much on its GPU; returns the descriptors."""
        return self.peers.ask("make_memory", num_bytes)

    def join(self, memberships: Sequence[Membership], max_num_seqs: int) -> None:
        """Let the other ranks map their arenas of these pools, the worker's own first, and share
        its locks: the kernel drops a lock when the last rank has ended (law 5)."""
        locks = [one.lock.fileno() for one in memberships]
        kept = [one.kept for one in memberships if one.kept is not None]
        descriptors = [
            [*locks, *(memory.fds[rank] for memory in kept)] for rank in range(1, self.size)
        ]
        pools = [(one.directory, one.header) for one in memberships]
        self.peers.ask("join", pools, max_num_seqs, descriptors=descriptors)

    def leave(self) -> None:
        """Let the other ranks unmap their arenas and close the locks; no step may be in flight. If
        one does not do so (it hangs since the last step), the process ends, and all ranks with it.
        """
        try:
            self.peers.ask("leave", limit_s=_LEAVE_LIMIT_S)
        except (OSError, EOFError):  # it has not answered in time, or has ended
            self.end_stuck(_LEAVE_LIMIT_S)

    def swapping(self, copy: Copy, *, out: bool) -> Copy:
        """A copy to the swap pool (`out`) or back, of all ranks."""

        def swap(pairs: Sequence[tuple[int, int]]) -> None:
            self.peers.ask("swap_blocks", out, tuple(pairs), meanwhile=lambda: copy(pairs))

        return swap

    def end_stuck(self, limit_s: float) -> None:
        """End the worker, which has waited for `limit_s`; even ranks that are stopped."""
        self._closed = True
        for process in self._processes:
            process.kill()
        end_process(limit_s)

    def close(self) -> None:
        """End the other ranks, and wait for their end."""
        self._closed = True
        if self._collectives is not None:
            self._collectives.abort()  # NCCL would wait for ranks that have ended
        self.peers.close()
        for process in self._processes:
            process.wait()

    def _watch(self) -> None:
        """Wait until a rank closes its socket: it has ended, or is ending."""
        poll = select.poll()
        ranks = {fd: rank for rank, fd in enumerate(self._watched, 1)}
        for fd in ranks:
            poll.register(fd, 0)  # POLLHUP is always reported
        rank = ranks[poll.poll()[0][0]]
        status = self._processes[rank - 1].wait()
        if not self._closed:
            self.on_end(rank, status)
