"""The mover's own pool: finds it, joins it without PyTorch, leaves it.

A mover is a member of its pool like a worker: a lock file, a name in the store, stamps for what it
writes. It also tells the block manager its process, because a network adapter may write until that
has exited.
"""

import asyncio
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from blockstore.records import PoolSpec
from blockstore.redis_store import RedisStore
from services.mover.transport import Region
from services.pool.directory import PoolDirectory, pool_directories
from services.pool.header import BadHeader, PoolHeader
from services.pool.keeper import KeptMemory, Registration, register
from services.pool.locks import WorkerLock, host_lock
from services.pool.members import leave_pool, register_member
from services.pool.stamps import Stamps, map_file
from services.runtime.errors import StartupError


@dataclass(frozen=True, slots=True)
class OwnPool:
    """A joined pool, and its memory, mapped until the process ends."""

    store: RedisStore
    directory: PoolDirectory
    header: PoolHeader
    member_id: str
    lock: WorkerLock
    kept: KeptMemory
    stamps: Stamps
    blocks_region: Region

    @property
    def spec(self) -> PoolSpec:
        return self.header.spec

    @property
    def has_workers(self) -> bool:
        """Whether a member lives besides this one."""
        return set(self.directory.live_worker_ids()) != {self.member_id}

    def close(self) -> None:
        """Drop the lock, when nothing lands any more. The pool's directory says so: the block
        manager need not wait for the end of this process, which may live on."""
        if not self.lock.is_unlinked:
            with suppress(OSError):  # the pool is gone
                self.directory.finished_path(self.member_id).touch(0o600)
        self.lock.close()
        self.kept.close()

    async def leave(self) -> None:
        """Leave the pool, when the mover holds nothing and nothing lands any more. After
        WorkerNotEmpty, StoreUnavailable or StoreLost the block manager does the rest."""
        await leave_pool(self.store, self.directory, self.member_id, self.lock)


def find_pool(root: Path, model_name: str) -> PoolDirectory | None:
    """Return the live pool of a model, or None if there is none yet. An empty `model_name` means
    the only pool. Raises StartupError if there are several."""
    found: dict[str, PoolDirectory] = {}
    for directory in pool_directories(root):
        try:
            header = directory.read_header()
        except (BadHeader, FileNotFoundError):
            continue  # of another version, or just removed
        is_wanted = header.colder_of is None and model_name in ("", header.layout.model)
        if not is_wanted or not directory.is_live():
            continue
        found[header.layout.model] = directory
    if len(found) > 1:
        raise StartupError(
            f"{root} has pools of {', '.join(sorted(found))}: set QUIRE_MOVER_MODEL_NAME to one"
        )
    return next(iter(found.values()), None)


async def join_pool(store: RedisStore, directory: PoolDirectory, member_id: str) -> OwnPool:
    """Join a live pool. Raises FileNotFoundError or BadHeader if the pool was just removed, and
    StartupError if the block manager or the store refuses this member."""
    async with host_lock(directory.path.parent):
        header = directory.read_header()
        with ExitStack() as undo:
            if header.kind != "file":
                await asyncio.to_thread(_open_gpus, header)
            # First: a member with a lock and without a record may be reaped before it has exited.
            # With several ranks this process writes on the GPU of each.
            registration = Registration(header.pool_id, member_id, header.gpu_uuids)
            pids = [os.getpid()] * (len(header.gpu_uuids) - 1)
            kept = register(directory.path.parent, registration, is_live=True, pids=pids)
            undo.callback(directory.process_path(member_id).unlink, missing_ok=True)
            undo.callback(kept.close)
            lock = WorkerLock.create(directory.lock_path(member_id))
            undo.callback(lock.close)
            undo.callback(lock.unlink)
            stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
            blocks = await asyncio.to_thread(_blocks, directory, header, kept)
            await register_member(store, store.run_id, directory, header, member_id, stamps, lock)
            undo.pop_all()
    return OwnPool(store, directory, header, member_id, lock, kept, stamps, blocks)


def _open_gpus(header: PoolHeader) -> None:
    """Open the pool's GPUs, so that their drivers list this process when the keeper looks. Raises
    StartupError if one is not here."""
    from services.mover.peer_transport import drivers_of  # imports torch

    drivers_of(header)


def _blocks(directory: PoolDirectory, header: PoolHeader, kept: KeptMemory) -> Region:
    """Map the arenas of the pool. Raises StartupError if a GPU's memory cannot be mapped."""
    if header.kind == "file":
        arenas = [map_file(path, header.arena_bytes) for path in directory.arenas]
        return Region.of(arenas, header.layout.block_bytes, header.num_blocks)
    from services.mover.peer_transport import map_own  # imports torch

    return map_own(header, [os.dup(fd) for fd in kept.fds])
