"""The keeper: holds the memory of pools on GPUs, and the pidfds of their workers.

It maps nothing and links no CUDA: a descriptor alone keeps the memory, so a pool outlives every
worker that has mapped it. `services.pool.keeper` is the workers' side and the protocol.
"""

import asyncio
import json
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from services.block_manager.gpu.processes import GpuProcesses, ProcessListError
from services.block_manager.gpu.weight_keeper import WeightKeeper, until_readable
from services.block_manager.liveness import WorkerProcesses
from services.pool.keeper import (
    MAX_BYTES,
    MAX_FDS,
    KeeperRefusal,
    Registration,
    close_all,
    pool_of,
    socket_address,
)
from services.pool.kept_weights import WeightsKey
from services.runtime.logging import get_logger

log = get_logger(__name__)


class Keeper:
    """Keeps memory for the workers that connect to its socket."""

    def __init__(self, root: Path, processes: WorkerProcesses, listed: GpuProcesses) -> None:
        self._root = root
        self._processes = processes
        self._listed = listed
        self._memory: dict[str, tuple[int, ...]] = {}
        self._weights = WeightKeeper()
        self._registering = asyncio.Lock()

    async def run(self) -> NoReturn:
        """Serve workers until cancelled."""
        loop = asyncio.get_running_loop()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            listening = stack.enter_context(_listen(self._root))
            stack.callback(self._close)
            async with asyncio.TaskGroup() as connections:
                while True:
                    connection, _ = await loop.sock_accept(listening)
                    connections.create_task(self._serve(connection))

    async def release_removed(self) -> None:
        """Give up the memory of pools whose directories are gone."""
        async with self._registering:
            self._release_removed()

    def _release_removed(self) -> None:
        for pool_id in [p for p in self._memory if not (self._root / p).exists()]:
            close_all(self._memory.pop(pool_id))
            log.info("pool_memory_released", pool_id=pool_id)

    def _close(self) -> None:
        for fds in self._memory.values():
            close_all(fds)
        self._memory.clear()
        self._weights.close()
        self._processes.close()

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one message, and keep the connection until the worker ends it."""
        loop = asyncio.get_running_loop()
        with connection:
            connection.setblocking(False)
            path: Path | None = None
            await until_readable(connection)
            try:
                data, fds, _, _ = socket.recv_fds(
                    connection, MAX_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
                if (key := _weights_key(data)) is not None:
                    await self._weights.serve(connection, key, fds)
                    return
                async with self._registering:
                    # In a thread, because the driver may take its time to list processes.
                    path, memory = await asyncio.to_thread(self._register, data, fds)
                socket.send_fds(connection, [b"{}"], memory)
            except KeeperRefusal as refusal:
                log.warning("registration_refused", reason=str(refusal))
                answer = {"error": str(refusal), "is_final": refusal.is_final}
                with suppress(OSError):
                    connection.send(json.dumps(answer).encode())
            except OSError as error:
                log.warning("registration_failed", reason=str(error))
            with suppress(OSError):
                await loop.sock_recv(connection, 1)
            if path is not None and not path.exists():
                self._processes.forget(path)  # the worker has left

    def _register(self, data: bytes, fds: list[int]) -> tuple[Path | None, tuple[int, ...]]:
        """Take over a registration and its descriptors, and return the path of the worker's record
        and the pool's memory."""
        with ExitStack() as closing:
            closing.callback(close_all, fds)
            self._release_removed()
            try:
                registration = Registration.decode(data)
                if registration == Registration():
                    return None, ()
                if not registration.worker_id and registration.pool_id in self._memory:
                    return None, self._memory[registration.pool_id]
                directory = pool_of(self._root, registration)
                pool_id, worker_id = registration.pool_id, registration.worker_id
                gpus = registration.gpu_uuids
                if not gpus:
                    self._processes.add(directory, worker_id, fds, [""], self._listed)
                    return directory.process_path(worker_id), ()
                pidfds, memory = fds[: len(gpus)], fds[len(gpus) :]
                if len(pidfds) != len(gpus) or len(memory) not in (0, len(gpus)):
                    raise ValueError(f"{len(fds)} descriptors for {len(gpus)} ranks")
                if pool_id not in self._memory and not memory:
                    raise KeeperRefusal(f"no worker has brought the memory of {pool_id}", False)
                records = self._processes.add(directory, worker_id, pidfds, gpus, self._listed)
                for one in (record for record in records if not record.is_listed):
                    log.warning(
                        "worker_not_listed",
                        worker_id=worker_id,
                        gpu_uuid=one.gpu_uuid,
                        reason=f"the driver does not list process {one.pid}: containers need the "
                        "host's PID namespace (pid: host). Blocks of a worker that dies stay "
                        "unused until the pool ends",
                    )
            except (ValueError, ProcessListError) as error:
                raise KeeperRefusal(str(error), True) from error
            except OSError as error:  # the pool is gone
                raise KeeperRefusal(str(error), False) from error
            if pool_id not in self._memory:
                self._memory[pool_id] = tuple(map(os.dup, memory))
            return directory.process_path(worker_id), self._memory[pool_id]


def _listen(root: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket_address(root) as address:
        Path(address).unlink(missing_ok=True)
        listening.bind(address)
        os.chmod(address, 0o600)
    listening.listen()
    listening.setblocking(False)
    return listening


def _weights_key(data: bytes) -> WeightsKey | None:
    with suppress(ValueError):  # `Registration.decode` refuses it
        return WeightsKey.decode(data)
    return None
