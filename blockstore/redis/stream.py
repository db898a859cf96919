"""One ordered stream of commands to the server, over one connection at a time.

The server executes commands in the order in which they were submitted; callers may wait for several
at once. One exchange sends several queued commands together and reads their replies. A command
without a reply (the connection broke, or the time limit passed) keeps its place in the queue and is
sent again before any later one. Before that, the stream kills its old connection on the server, so
that the server cannot execute its commands late, out of order. A command that the server refuses
because it has lost its data, or because it is not the primary, is sent again, too: the one stream
of a pool that `renews` sends nothing until the data is rebuilt.

    queue   [ sent, no reply yet  | not sent yet              ]
              <---- one exchange ---->
              first to be answered, first to be sent again

After a lost reply, a command may run again although later commands of its exchange have run. So
every command must be safe to send twice, and an exchange never has two commands about the same
subject: an allocation that is sent again after its holder's release would be refused.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from blockstore.errors import BlockStoreError, NotPrimary, StoreUnavailable
from blockstore.redis.connection import Command, ask, read_reply, translate, translate_errors
from blockstore.redis.server import Server
from blockstore.task_cancellation import cancel_task

MAX_IN_FLIGHT = 128
"""The most commands of one exchange: enough to hide the round trip, few enough to be sent again
quickly."""

MAX_BACKOFF_S = 0.25

MAX_IDLE_S = 60.0
"""A stream that has nothing to send for this long closes its connection, so that streams of pools
that are gone keep none."""

Record = Callable[[object], None]
"""Called with each reply or error before the caller of the command gets it, even if that caller was
cancelled."""


@dataclass(slots=True)
class _Call:
    """A packed command and the future of its reply; `deadline` is a time of the loop's clock."""

    command: bytes
    about: Collection[str] | None
    deadline: float
    record: Record | None
    is_loss: Callable[[Exception], bool]
    reply: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    def settle(self, reply: object) -> None:
        if self.record is not None:
            self.record(reply)
        if self.reply.done():  # its caller was cancelled
            return
        if isinstance(reply, Exception):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class CommandStream:
    """Sends commands in order, and again until the server answers or `retry_for_s` has passed.
    With `renews`, the stream rebuilds data that the server has lost (`Server.open`)."""

    def __init__(self, server: Server, retry_for_s: float, renews: bool = False) -> None:
        self._server = server
        self._retry_for_s = retry_for_s
        self._renews = renews
        self._queue: deque[_Call] = deque()
        self._queued = asyncio.Event()
        self._drained = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._client = ("", 0)  # (process_id of the server, id of our connection there)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def send(self, *command: str | bytes | int) -> Any:
        """Return the reply to a command that has no subject; see `submit`."""
        return await self.submit(command)

    def wake(self) -> None:
        """Rebuild the server's data now, even if no command is queued: the server is in doubt."""
        if not self._closed:
            self._start()
            self._queued.set()

    def submit(
        self,
        command: Command,
        about: Collection[str] | None = frozenset(),
        record: Record | None = None,
        is_loss: Callable[[Exception], bool] = lambda error: False,
    ) -> asyncio.Future[Any]:
        """Queue a command and return its future reply. Cancelling the caller does not remove the
        command from the queue.

        `about` names the command's subjects; a command with None is sent alone. If `is_loss` says
        that an error means lost data, the command stays queued and is sent again. The reply raises
        the server's error, StoreLost, or StoreUnavailable if there is no reply within `retry_for_s`
        (the command may or may not have been executed). Raises TypeError at once if an argument is
        not text, bytes or a number.
        """
        self._server.check()
        if self._closed:
            raise StoreUnavailable(f"{self._server.url}: the store is closed")
        self._start()
        packed = pack_command(tuple(command))  # type: ignore[arg-type]  # the stub has 1 argument
        deadline = asyncio.get_running_loop().time() + self._retry_for_s
        call = _Call(packed, about, deadline, record, is_loss)
        self._queue.append(call)
        self._queued.set()
        return call.reply

    async def close(self, drain_s: float = 1.0) -> None:
        """Wait at most `drain_s` for queued commands, then fail the rest with StoreUnavailable."""
        self._closed = True
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._queue:
                    self._drained.clear()
                    await self._drained.wait()
        await cancel_task(self._task)

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="blockstore-stream")

    async def _run(self) -> None:
        try:
            while True:
                await self._wait_for_calls()
                await self._answer_queued()
                self._drained.set()
        finally:
            self._closed = True
            await self._disconnect()
            self._fail_all(StoreUnavailable(f"{self._server.url}: the store is closed"))

    async def _wait_for_calls(self) -> None:
        """Wait until there is something to do; an idle connection is closed meanwhile."""
        try:
            async with asyncio.timeout(MAX_IDLE_S):
                await self._queued.wait()
        except TimeoutError:
            await self._disconnect()
            await self._queued.wait()
        self._queued.clear()

    async def _answer_queued(self) -> None:
        """Exchange until every queued command has been answered or has expired, and the server is
        no longer in doubt."""
        backoff_s = 0.0
        while self._queue or self._has_to_renew:
            try:
                async with asyncio.timeout_at(self._queue[0].deadline if self._queue else None):
                    await self._exchange()
                backoff_s = 0.0
                continue
            except (StoreUnavailable, TimeoutError) as error:
                await self._disconnect()
                self._expire(error)
            except BlockStoreError as error:
                await self._disconnect()
                self._fail_all(error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(max(0.01, 2 * backoff_s), MAX_BACKOFF_S)

    async def _exchange(self) -> None:
        """Send the first commands of the queue, and remove each one when its reply arrives."""
        if self._server.in_doubt:  # unread replies are of the lost data
            await self._disconnect()
        connection = self._connection or await self._connect()
        calls = self._next_calls()
        if not calls:
            return
        with translate_errors(self._server.url):
            await connection.send_packed_command([call.command for call in calls])
            for call in calls:
                async with asyncio.timeout(self._server.timeout_s):
                    reply = self._translated(await read_reply(connection))
                if isinstance(reply, NotPrimary):
                    raise reply
                if isinstance(reply, Exception) and call.is_loss(reply):
                    self._server.mark_in_doubt()
                    raise StoreUnavailable(str(reply))
                self._queue.popleft()
                call.settle(reply)

    @property
    def _has_to_renew(self) -> bool:
        return self._renews and self._server.in_doubt

    def _next_calls(self) -> list[_Call]:
        """Return the first calls of the queue that may be sent in one exchange."""
        if not self._queue:
            return []
        first = self._queue[0]
        calls, seen = [first], set(first.about or ())
        for call in islice(self._queue, 1, MAX_IN_FLIGHT):
            if first.about is None or call.about is None or not seen.isdisjoint(call.about):
                break
            seen.update(call.about)
            calls.append(call)
        return calls

    def _translated(self, reply: object) -> object:
        return translate(self._server.url, reply) if isinstance(reply, ResponseError) else reply

    async def _connect(self) -> AbstractConnection:
        connection = await self._server.open(self._renews)
        process_id, old_id = self._client
        try:
            with translate_errors(self._server.url):
                client_id = await ask(connection, "CLIENT", "ID")
                if process_id == self._server.process_id:
                    await ask(connection, "CLIENT", "KILL", "ID", old_id)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        # With this limit, redis-py writes in a task of its own and waits for it, which takes three
        # turns of the event loop. `_exchange` and `_answer_queued` limit the time instead.
        connection.socket_timeout = None
        self._connection, self._client = connection, (self._server.process_id, client_id)
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    def _expire(self, error: Exception) -> None:
        """Fail the first commands whose deadline has passed; later ones keep their place."""
        now = asyncio.get_running_loop().time()
        while self._queue and self._queue[0].deadline <= now:
            text = str(error) or f"{self._server.url}: no answer"
            unavailable = StoreUnavailable(f"{text} (gave up after {self._retry_for_s:g} s)")
            unavailable.__cause__ = error
            self._queue.popleft().settle(unavailable)

    def _fail_all(self, error: BlockStoreError) -> None:
        while self._queue:
            self._queue.popleft().settle(type(error)(*error.args))
