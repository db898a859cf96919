"""Calls the functions in a store's server, and detects that the server has lost its data.

Mutations go through one ordered stream, which sends them again, in order, until they are answered.
Reads have a connection of their own, and so has the subscription to freed blocks. When the server
has lost its data, the stream of mutations rebuilds it (`_renew`) before it sends anything else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from blockstore import keys
from blockstore.connection import Argument, Command, Server
from blockstore.errors import Recovering, StoreLost, UnknownPool
from blockstore.free_block_notifier import FreeBlockNotifier
from blockstore.held_blocks_mirror import HeldBlocksMirror
from blockstore.library import load_functions
from blockstore.store import FUNCTION_LIBRARY
from blockstore.stream import CommandStream, Record

MAX_ANSWER_S = 2.0
"""A connection without an answer for this long counts as broken."""


class RedisCalls(ABC):
    """The part of `RedisStore` that connects, calls functions and detects a loss."""

    def __init__(self, url: str, server: Server, retry_for_s: float) -> None:
        """Use `connect`."""
        self._url = url
        self._server = server
        self._mutations = CommandStream(server, retry_for_s, renews=True)
        self._reads = CommandStream(server, retry_for_s)
        self._free_block_notifier = FreeBlockNotifier(server)
        # By pool. If the server does not know one of these pools, it has lost its data.
        self._joined: dict[str, list[HeldBlocksMirror]] = {}

    @classmethod
    async def connect(cls, url: str, *, retry_for_s: float = 5.0) -> Self:
        """Connect to a server at redis://, rediss:// or unix://, and load the functions.

        `retry_for_s`: how long an unanswered call is sent again. StoreUnavailable: the server does
        not answer. StoreUnsuitable: it is older than Redis 7, may evict keys, is a replica, or has
        other functions of this name.
        """
        store = await cls._connect_once(url, retry_for_s)
        store._server.set_renew(store._renew, store._mutations.wake)
        return store

    @classmethod
    async def _connect_once(cls, url: str, retry_for_s: float) -> Self:
        """Connect like `connect`, but without a recovery: the store ends if the server restarts."""
        server = Server(url, timeout_s=min(MAX_ANSWER_S, retry_for_s / 2))
        await load_functions(server)
        return cls(url, server, retry_for_s)

    @property
    def run_id(self) -> str:
        """The server's run_id; it changes when a restarted server has been renewed."""
        return self._server.run_id

    async def close(self) -> None:
        await self._free_block_notifier.close()
        await self._mutations.close()
        await self._reads.close()

    # Calling

    async def _mutate(
        self,
        function: str,
        pool_id: str,
        *args: Argument,
        about: Collection[str] | None = None,
        record: Callable[[HeldBlocksMirror, Any], None] | None = None,
    ) -> Any:
        """Call a function that changes the pool. `about`: the holders that it changes; None: the
        pool or a worker as a whole. `record` updates each held-blocks mirror on the pool with the
        answer."""

        def record_all(reply: object) -> None:
            for mirror in self._mirrors_of(pool_id):
                assert record is not None
                record(mirror, reply)

        command = _fcall("FCALL", function, pool_id, args)
        return await self._submit(self._mutations, pool_id, command, about, record and record_all)

    async def _read(self, function: str, pool_id: str, *args: Argument) -> Any:
        command = _fcall("FCALL_RO", function, pool_id, args)
        return await self._submit(self._reads, pool_id, command, frozenset())

    async def _submit(
        self,
        stream: CommandStream,
        pool_id: str,
        command: Command,
        about: Collection[str] | None,
        record: Record | None = None,
    ) -> Any:
        def is_loss(error: Exception) -> bool:
            if not self._recoverable:
                return False
            unknown = isinstance(error, UnknownPool | Recovering) and pool_id in self._joined
            return unknown or isinstance(error, StoreLost)

        with self._detect_loss(pool_id):
            return await stream.submit(command, about, record, is_loss)

    @contextmanager
    def _detect_loss(self, pool_id: str) -> Iterator[None]:
        """Raises StoreLost instead of UnknownPool if this store has registered or joined the
        pool."""
        try:
            yield
        except UnknownPool as error:
            if pool_id in self._joined:
                raise self._server.mark_lost(f"pool {pool_id} is gone") from error
            raise

    def _mirrors_of(self, pool_id: str) -> list[HeldBlocksMirror]:
        return self._joined.get(pool_id, [])

    def _join(self, pool_id: str, run_id: bytes) -> None:
        """Record that this store uses the pool. StoreLost: the pool was made before the server
        restarted; the server read an old state from a file."""
        if run_id.decode() != self.run_id:
            raise self._server.mark_lost(f"pool {pool_id} is older than the server's restart")
        self._joined.setdefault(pool_id, [])

    # When the server has lost its data

    @property
    def _recoverable(self) -> bool:
        """Whether each pool that this store uses was joined by a worker of this store, and all of
        these workers have a `recovery`."""
        return all(
            pool and all(joined.recovery is not None for joined in pool)
            for pool in self._joined.values()
        )

    @abstractmethod
    async def _renew(self, run_id: str) -> None:
        """Report everything that this store's workers hold to the server with this run_id, and wait
        until the pools are rebuilt. StoreUnavailable: call it again. Other errors end the store."""


def _fcall(command: str, function: str, pool_id: str, args: Sequence[Argument]) -> Command:
    return command, f"{FUNCTION_LIBRARY}_{function}", 1, keys.pool_tag(pool_id), *args
