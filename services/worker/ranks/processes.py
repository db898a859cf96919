"""Starts the other ranks of a worker, and ends the worker when one of them has ended."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import torch

from kvops import Backend
from services.common.checkpoint.shards import Shard, check_shards
from services.common.pool.layout import PoolLayout
from services.common.runtime.logging import get_logger
from services.common.runtime.process import EXIT_FAULT
from services.common.text.model_config import ModelConfig
from services.engine.device.gpu_memory import GpuMemoryPlan
from services.engine.device.opening import OpenDevice
from services.engine.models.decoder import ComposedModel
from services.engine.models.load import load_shard
from services.engine.ranks.collectives import connect
from services.engine.ranks.lead import Followers, LeadModel, swapping
from services.engine.ranks.messages import (
    BeginMeasuring,
    Connect,
    EndMeasuring,
    Join,
    Leave,
    Load,
    MakeMemory,
    RankArena,
)
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import SharedWeights
from services.worker.config import WorkerSettings
from services.worker.liveness.step_watch import end_process
from services.worker.membership import Membership

_LEAVE_LIMIT_S = 5.0
"""How long the other ranks may take to give up their arenas."""

Copy = Callable[[Sequence[tuple[int, int]]], None]

log = get_logger(__name__)


def end_worker(rank: int, status: int) -> None:
    """End this process at once: without rank `rank` no step can be computed, and the worker's locks
    must be dropped soon, so that others continue its requests."""
    log.critical("rank_ended", rank=rank, exit_status=status)
    os._exit(EXIT_FAULT)


class Ranks:
    """The other ranks of this worker, from rank 1 on. They live as long as this process; a worker
    that rejoins its pool keeps them.

    `on_end(rank, exit status)` is called, in a thread, when a rank ends before `close`.
    """

    def __init__(
        self,
        size: int,
        log_level: str = "info",
        log_format: str = "json",
        on_end: Callable[[int, int], None] = end_worker,
    ) -> None:
        self.size = size
        self.gpu_uuids: Sequence[str] = ()
        self._on_end = on_end
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        connections = []
        for _ in range(1, size):
            ours, theirs = socket.socketpair()
            self._processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "services.worker.ranks"),
                        *(str(theirs.fileno()), log_level, log_format),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            )
            theirs.close()
            connections.append(Connection(ours.detach()))
        self._followers = Followers(connections)
        self._watched = [connection.fileno() for connection in connections]
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    def load(
        self,
        directory: Path,
        dtype: torch.dtype,
        backend: Backend,
        devices: Sequence[str],
        num_threads: int,
        timeout_s: float,
        context: int | None,
        block_size: int,
        kv_dtype: torch.dtype,
        progress: Progress = lambda: None,
        *,
        shared: SharedWeights | None = None,
        keeper: Path | None = None,
        measures: bool = False,
    ) -> LeadModel:
        """Load the model's shards, each rank its own, and connect the ranks.

        `devices`: of all ranks, as in the settings. `shared`: this rank's weights, if the keeper in
        the directory `keeper` has those of each GPU; see `load_model`. `measures`: whether the
        memory of GPUs is to be measured. `timeout_s`: an exchange that a rank does not join for so
        long fails; that ends the worker.
        `progress` may raise to stop. StartupError: the model cannot be divided or loaded.
        """
        config = ModelConfig.from_directory(directory)
        check_shards(config, self.size)
        meeting = Path(mkdtemp(prefix="quire-ranks-"))
        isa = backend.native.isa if backend.native else None
        messages = [
            Load(
                *(directory, dtype, backend.name, isa, devices[rank], num_threads),
                *(rank, self.size, meeting / "store", timeout_s),
                context=context,
                block_size=block_size,
                kv_dtype=kv_dtype,
                keeper=keeper if shared else None,
                measures=measures,
            )
            for rank in range(1, self.size)
        ]
        shards: list[ComposedModel] = []

        def load_own() -> None:
            device = str(OpenDevice(devices[0]).torch)
            own = load_shard(
                *(directory, dtype, backend, device, 0, self.size, context, progress, shared)
            )
            shards.append(own)
            self._followers.wait(progress)

        def connect_own() -> None:
            (own,) = shards
            shard = Shard(config, 0, self.size)
            own.collectives = connect(meeting / "store", shard, own.device, timeout_s)

        try:
            self.gpu_uuids = self._followers.ask_each(messages, load_own)
            self._followers.ask(Connect(), meanwhile=connect_own)
        finally:
            rmtree(meeting)
        (own,) = shards
        assert own.collectives is not None
        return LeadModel(own, own.collectives, self._followers)

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def measure(
        self, layout: PoolLayout, settings: WorkerSettings, own: Callable[[], GpuMemoryPlan]
    ) -> list[GpuMemoryPlan]:
        """The plans of all ranks' GPUs. `own`: measures rank 0, by steps of all ranks."""
        self._followers.ask(BeginMeasuring(layout))
        plan = own()
        shares = settings.num_expected_workers, settings.gpu_memory_utilization
        return [plan, *self._followers.ask(EndMeasuring(*shares))]

    def make_memory(self, num_bytes: int) -> Sequence[int]:
        return self._followers.ask(MakeMemory(num_bytes))

    def join(self, memberships: Sequence[Membership], max_num_seqs: int) -> None:
        """Let the other ranks map their arenas of these pools, the worker's own first, and share
        its locks: the kernel drops a lock when the last rank has ended (law 5)."""
        messages, descriptors = [], []
        for rank in range(1, self.size):
            arenas = tuple(_arena(one, rank) for one in memberships)
            messages.append(Join(arenas, max_num_seqs))
            fds: list[int] = []
            for one in memberships:
                fds += [one.lock.fileno(), *([one.kept.fds[rank]] if one.kept else [])]
            descriptors.append(fds)
        self._followers.ask_each(messages, descriptors=descriptors)

    def leave(self) -> None:
        """Let the other ranks unmap their arenas and close the locks; no step may be in flight. If
        one does not do so (it hangs since the last step), the process ends, and all ranks with it.
        """
        if not self._followers.ask_within(Leave(), _LEAVE_LIMIT_S):
            self.end_stuck(_LEAVE_LIMIT_S)

    def swapping(self, copy: Copy, *, out: bool) -> Copy:
        """A copy to the swap pool (`out`) or back, of all ranks."""
        return swapping(self._followers, copy, out=out)

    def end_stuck(self, limit_s: float) -> None:
        """End the worker, which has waited for `limit_s`; even ranks that are stopped."""
        self._closed = True
        for process in self._processes:
            process.kill()
        end_process(limit_s)

    def close(self) -> None:
        """End the other ranks, and wait for their end."""
        self._closed = True
        self._followers.close()
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
            self._on_end(rank, status)


def _arena(one: Membership, rank: int) -> RankArena:
    directory, header = one.directory, one.header
    path = directory.arena(rank) if header.kind == "file" else None
    num_bytes = header.arena_bytes if path else header.memory_bytes
    return RankArena(path, num_bytes, header.layout, header.num_blocks, directory.gone)
