"""Waits until blocks are freed, with one subscription connection for all waiters of a store."""

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from blockstore.errors import BlockStoreError, NotPrimary, StoreUnavailable
from blockstore.redis.connection import translate_errors
from blockstore.redis.server import Server
from blockstore.task_cancellation import cancel_task

RECONNECT_S = 0.05


class FreeBlockNotifier:
    """Ends the waits on a channel when a message arrives there.

    A new subscription ends the waits of its channel, too: a message before it may have been missed.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._connection: AbstractConnection | None = None
        self._subscribed: set[str] = set()  # on this connection
        self._task: asyncio.Task[None] | None = None

    async def wait(
        self, channel: str, timeout_s: float, require: Callable[[], Awaitable[None]]
    ) -> None:
        """Return after a message on `channel` or after the timeout. `require` runs when the wait is
        registered already, so that a message during it is not missed. Raises the errors of
        `require`, StoreLost or StoreUnsuitable."""
        self._check()
        announced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[channel].add(announced)
        try:
            await require()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._subscribe(channel)
                    await announced
        finally:
            self._waiting[channel].discard(announced)
        self._check()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_task(self._task)

    def _check(self) -> None:
        """Raise the error that ended the store or the listening task, if any."""
        self._server.check()
        if self._task is not None and self._task.done():
            self._task.result()

    async def _subscribe(self, channel: str) -> None:
        """Subscribe to the channel, if that is not done. A new connection subscribes to the
        channels of all waits by itself."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="blockstore-rooms")
        elif self._connection is not None and channel not in self._subscribed:
            self._subscribed.add(channel)
            with contextlib.suppress(RedisError):  # a broken connection; `_follow` notices it, too
                await self._connection.send_command("SSUBSCRIBE", channel)

    async def _listen(self) -> None:
        """Keep a subscription connection open until closed, or until the store has ended."""
        while True:
            try:
                await self._follow(await self._server.open())
            except StoreUnavailable:
                await asyncio.sleep(RECONNECT_S)
            except BlockStoreError:  # every `wait` that wakes now raises it
                for channel in self._waiting:
                    self._wake(channel)
                raise

    async def _follow(self, connection: AbstractConnection) -> None:
        """End waits as messages arrive. Raises StoreUnavailable if the connection breaks."""
        self._connection, self._subscribed = connection, set(self._waiting)
        try:
            with translate_errors(self._server.url):
                await connection.send_command("SSUBSCRIBE", *self._subscribed)
                while True:
                    kind, channel, _ = await connection.read_response(timeout=math.inf)
                    if kind == b"sunsubscribe":  # the cluster has moved the channel's slot
                        raise NotPrimary(f"{self._server.url}: {channel.decode()} has moved")
                    self._wake(channel.decode())
        finally:
            self._connection = None
            await connection.disconnect(nowait=True)

    def _wake(self, channel: str) -> None:
        for announced in self._waiting[channel]:
            if not announced.done():
                announced.set_result(None)
