"""The keeper's part for weights: one copy on a GPU for all workers that have the same.

`services.pool.kept_weights` is the workers' side and the protocol.
"""

import asyncio
import json
import os
import socket
from collections import Counter

from services.pool.keeper import MAX_BYTES
from services.pool.kept_weights import WeightsKey
from services.runtime.logging import get_logger

log = get_logger(__name__)

_Name = tuple[str, str]


class WeightKeeper:
    """Holds sealed weights while a worker is connected that has them, and lets one worker fill."""

    def __init__(self) -> None:
        self._sealed: dict[_Name, tuple[int, int]] = {}
        self._users: Counter[_Name] = Counter()
        self._filling: set[_Name] = set()
        self._changed = asyncio.Condition()

    async def serve(self, connection: socket.socket, key: WeightsKey, fds: list[int]) -> None:
        """Serve a worker until it ends. Takes over `fds`, the memory that this worker brings.
        Raises OSError if the worker has ended."""
        name = key.weights, key.gpu_uuid
        self._users[name] += 1
        try:
            if fds:
                self._seal(name, key.num_bytes, fds)
            elif not await self._is_sealed(name):
                await self._fill(connection, name)
            if name in self._sealed:
                fd, num_bytes = self._sealed[name]
                socket.send_fds(connection, [json.dumps({"num_bytes": num_bytes}).encode()], [fd])
                await asyncio.get_running_loop().sock_recv(connection, 1)
        finally:
            self._users[name] -= 1
            if not self._users[name] and name in self._sealed:
                os.close(self._sealed.pop(name)[0])
                log.info("weights_released", weights=key.weights, gpu_uuid=key.gpu_uuid)

    def close(self) -> None:
        for fd, _ in self._sealed.values():
            os.close(fd)
        self._sealed.clear()

    async def _is_sealed(self, name: _Name) -> bool:
        """Wait while another worker fills. Returns False if the caller's worker has to fill."""
        async with self._changed:
            await self._changed.wait_for(lambda: name not in self._filling)
            if name in self._sealed:
                return True
            self._filling.add(name)
            return False

    async def _fill(self, connection: socket.socket, name: _Name) -> None:
        """Let the worker fill. If it ends before it has sealed, nothing is left of it."""
        try:
            connection.send(b"{}")
            await until_readable(connection)
            data, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if data and (key := WeightsKey.decode(data)) is not None and fds:
                self._seal(name, key.num_bytes, fds)
        finally:
            async with self._changed:
                self._filling.discard(name)
                self._changed.notify_all()

    def _seal(self, name: _Name, num_bytes: int, fds: list[int]) -> None:
        """Keep the last of the descriptors. The first memory of this name counts: a second one was
        filled while no keeper was there."""
        *others, fd = fds
        for one in others:
            os.close(one)
        if name in self._sealed:
            os.close(fd)
            return
        self._sealed[name] = fd, num_bytes
        log.info("weights_sealed", weights=name[0], gpu_uuid=name[1], num_bytes=num_bytes)


async def until_readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
