"""A worker's side of the keeper, which holds the memory of pools on GPUs (in the block manager).

    worker                                   keeper
    pool, worker, GPUs                   ──▶ records the processes, keeps the descriptors
      + pidfds (+ memory), one a rank
                               memory    ◀── the pool's memory, as its first worker brought it
    (waits for the connection to end)        (ends when the block manager dies)

One message each way, over a Unix socket in the directory of the pools. Descriptors travel with the
messages (SCM_RIGHTS). A worker whose connection ends registers again, with the descriptor that it
has, until it ends itself. See ADR 120.
"""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from blockstore.errors import PoolGone
from services.pool.directory import PoolDirectory
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger

log = get_logger(__name__)

MAX_BYTES = 4096
MAX_FDS = 16  # of a worker of 8 ranks: a pidfd and the memory of each
_SOCKET = "keeper.sock"
_ANSWER_S = 5.0
PATIENCE_S = 15.0
"""How long a worker waits for a block manager that starts beside it."""

_RETRY_S = 0.1


class KeeperRefusal(Exception):
    """The keeper refuses a worker; the text says why. If it `is_final`, a later call cannot
    succeed."""

    def __init__(self, text: str, is_final: bool) -> None:
        super().__init__(text)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Registration:
    """The message of a worker, with the GPU of each rank. Without a GPU the sender is a mover, and
    only its process is recorded. With all fields empty it asks the keeper to give up the memory of
    pools that were removed; with the pool alone, for the memory, to read it."""

    pool_id: str = ""
    worker_id: str = ""
    gpu_uuids: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.worker_id

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Registration":
        """Raises ValueError if the message is not a registration."""
        fields = json.loads(data)
        if not isinstance(fields, dict) or set(fields) != {"pool_id", "worker_id", "gpu_uuids"}:
            raise ValueError(f"not a registration: {data[:100]!r}")
        uuids = tuple(map(str, fields["gpu_uuids"]))
        return cls(str(fields["pool_id"]), str(fields["worker_id"]), uuids)


@contextmanager
def socket_address(root: Path) -> Iterator[str]:
    """The address of the keeper's socket under `root`, however long that path is: the address of a
    Unix socket has at most 107 bytes."""
    fd = os.open(root, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET}"
    finally:
        os.close(fd)


class Message(Protocol):
    """The registration that a worker sends, and its name in logs."""

    @property
    def name(self) -> str: ...

    def encode(self) -> bytes: ...


class KeptMemory:
    """A worker's registration at the keeper, and the descriptors that it brings again: `fds`, of
    each rank's memory; a mover has none. `pids` are of the other ranks."""

    def __init__(
        self,
        root: Path,
        registration: Message,
        fds: Sequence[int],
        connection: socket.socket,
        pids: Sequence[int] = (),
    ) -> None:
        self.fds = fds
        self._pids = pids
        self._root = root
        self._registration = registration
        self._connection = connection
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def fd(self) -> int:
        return self.fds[0]

    async def keep(self) -> NoReturn:
        """Register again whenever the keeper was gone, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):
                await loop.sock_recv(self._connection, 1)
            self._connection.close()
            log.warning("keeper_lost", name=self._registration.name)
            await self._return()
            log.info("keeper_found", name=self._registration.name)

    async def _return(self) -> None:
        while True:
            if await asyncio.to_thread(self._register_again):
                return
            await asyncio.sleep(_RETRY_S)

    def close(self) -> None:
        """End the registration, and close the descriptor. May be called again."""
        with self._closing:
            self._connection.close()
            if not self._is_closed:
                self._is_closed = True
                close_all(self.fds)

    def _register_again(self) -> bool:
        with self._closing:
            if self._is_closed:
                return True
            try:
                self._connection, fds = _ask(self._root, self._registration, self.fds, self._pids)
            except (OSError, KeeperRefusal) as error:
                if not isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    log.warning("keeper_refuses", reason=str(error))
                return False
            close_all(fds)
            return True


def register(
    root: Path,
    registration: Registration,
    memory: Sequence[int] = (),
    *,
    is_live: bool,
    pids: Sequence[int] = (),
) -> KeptMemory:
    """Register this process as a worker on a pool in the memory of GPUs, or as a pool's mover.
    Blocks.

    `memory` is of all ranks, if this worker made it; the caller keeps these descriptors. `is_live`
    tells whether another worker may bring the memory. `pids` are of the worker's other ranks.

    Raises StartupError if the block manager refuses or does not answer in time, and PoolGone if the
    pool has no other worker and the keeper does not have its memory.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection, fds = _ask(root, registration, memory, pids)
            return KeptMemory(root, registration, fds, connection, pids)
        except KeeperRefusal as refusal:
            error: Exception = refusal
            if not refusal.is_final and not is_live:
                raise PoolGone(str(refusal)) from refusal
            is_final = refusal.is_final
        except OSError as refused:
            error, is_final = refused, False
        if is_final or time.monotonic() > deadline:
            raise StartupError(
                f"the block manager, at {root / _SOCKET}, does not register "
                f"{registration.worker_id}"
                + f" on {', '.join(registration.gpu_uuids)}" * bool(registration.gpu_uuids)
                + f": {error}"
            ) from error
        time.sleep(_RETRY_S)


def borrow(root: Path, pool_id: str) -> list[int]:
    """Descriptors of the memory of a pool's ranks, for a process that only reads it and is not
    recorded. OSError, KeeperRefusal."""
    connection, fds = _exchange(root, Registration(pool_id), [])
    connection.close()
    return fds


def release_removed(root: Path) -> None:
    """Have the keeper give up the memory of removed pools. Nothing if there is no keeper."""
    with suppress(FileNotFoundError, ConnectionRefusedError):
        connection, _ = _exchange(root, Registration(), [])
        connection.close()


def _ask(
    root: Path, registration: Message, memory: Sequence[int], pids: Sequence[int]
) -> tuple[socket.socket, list[int]]:
    """Register once. Returns the connection and the pool's memory, if it is on GPUs. OSError,
    KeeperRefusal."""
    pidfds: list[int] = []
    try:
        for pid in (os.getpid(), *pids):
            pidfds.append(os.pidfd_open(pid))
        return _exchange(root, registration, [*pidfds, *memory])
    finally:
        close_all(pidfds)


def _exchange(
    root: Path, registration: Message, fds: Sequence[int]
) -> tuple[socket.socket, list[int]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ANSWER_S)
        with socket_address(root) as address:
            connection.connect(address)
        socket.send_fds(connection, [registration.encode()], fds)
        data, received, _, _ = socket.recv_fds(
            connection, MAX_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise ConnectionResetError("the block manager closed the connection")
        answer = json.loads(data)
        if "error" in answer:
            raise KeeperRefusal(answer["error"], answer["is_final"])
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection, received


def pool_of(root: Path, registration: Registration) -> PoolDirectory:
    """The directory that the registration names. Raises ValueError if these are not the names of a
    pool and of a worker on it."""
    for name in (registration.pool_id, registration.worker_id):
        if not name or name.startswith(".") or "/" in name:
            raise ValueError(f"{name!r} is not a name")
    return PoolDirectory(root / registration.pool_id)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
