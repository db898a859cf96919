"""Chooses where a worker computes: its entry on the CPU board, its NUMA nodes, and its memory."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.runtime.logging import get_logger
from services.runtime.numa.policy import InterleavePolicy
from services.runtime.numa.topology import HostCpus, format_cpus
from services.worker.config import WorkerSettings
from services.worker.cpu.board import CpuBoard, CpuBoardEntry
from services.worker.cpu.division import choose_domain, domains, lane_cpus

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place, from its start to its end. All workers divide the CPUs of `host`. The nodes
    of `weights` and `arena` share the pages of the packed weights and of a new pool."""

    host: HostCpus
    cpu_board: CpuBoard
    entry: CpuBoardEntry
    weights: InterleavePolicy
    arena: InterleavePolicy

    @property
    def num_cpus(self) -> int:
        """The divided CPUs of the worker's nodes."""
        return len(self.host.on(self.entry.nodes))

    def weights_cache(self, cache: Path | None) -> Path | None:
        """The directory of the worker's packed weights. Each domain has files of its own, because
        the kernel keeps one copy of a file, on the nodes of the worker that read it first."""
        if cache is None or self.entry.nodes == self.host.node_ids:
            return cache
        return cache / f"node{format_cpus(self.entry.nodes)}"


def take_place(settings: WorkerSettings, worker_id: str, host: HostCpus | None = None) -> Place:
    """Choose a place beside the host's other workers, and bind this thread, and those that it will
    start, to the place's nodes. `host` has the CPUs that this process may use; None reads them.

    Raises StartupError if the board is full, and OSError if it cannot be made.
    """
    whole = host or HostCpus.read(os.sched_getaffinity(0))
    if settings.numa == "off":
        whole = whole.as_one_node()
    num_workers = settings.num_expected_workers
    divided = whole.only(settings.divided_cpus)
    if settings.cpus == "auto":
        divided = lane_cpus(divided, num_workers)
    settings.pool_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    cpu_board = CpuBoard(settings.pool_root / "board")
    choices = domains(divided, num_workers)
    choose = partial(choose_domain, settings.role, choices)
    entry = cpu_board.take_entry(settings.role, worker_id, choose)
    log.info(
        "place_chosen",
        nodes=list(entry.nodes),
        num_nodes=len(divided.nodes),
        num_domains=len(choices),
        num_cores=len(whole.cores),
        num_cpus=len(whole.cpus),
        divided_cpus=format_cpus(divided.cpus),
    )
    if entry.nodes != divided.node_ids:
        _bind(whole.on(entry.nodes))
    return Place(
        divided, cpu_board, entry, InterleavePolicy(entry.nodes), InterleavePolicy(divided.node_ids)
    )


def _bind(cpus: tuple[int, ...]) -> None:
    """Hyperthreads included: other threads than the lanes may use them."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.warning("threads_not_bound", cpus=format_cpus(cpus), reason=error.strerror)
