"""Calls the functions in a store's server, and detects that the server has lost its data.

Every pool has connections of its own (`Link`), because in a cluster each pool may be on another
node. The mutations of a pool go through one ordered stream, which sends them again, in order, until
they are answered. Reads have a connection of their own, and so has the subscription to freed
blocks. When the server has lost a pool, its stream of mutations rebuilds it (`_renew`) before it
sends anything else.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from blockstore.errors import Recovering, StoreLost, UnknownPool
from blockstore.redis import keys
from blockstore.redis.connection import Argument, Command
from blockstore.redis.free_block_notifier import FreeBlockNotifier
from blockstore.redis.held_blocks_mirror import HeldBlocksMirror
from blockstore.redis.library import load_functions
from blockstore.redis.server import Renew, Server
from blockstore.redis.stream import CommandStream, Record
from blockstore.store import FUNCTION_LIBRARY, PREVIOUS_LIBRARY

MAX_ANSWER_S = 2.0
"""A connection without an answer for this long counts as broken."""

LISTING_S = 2.0
"""How often a worker's pool is added to the set of pools again."""


class Link:
    """A store's connections to the server of one pool, or of the set of pools.

    `mirrors` records what this store's workers hold on the pool; it is None until the store joins.
    If the server does not know a pool that the store has joined, the server has lost its data.
    """

    def __init__(self, url: str, key: str, retry_for_s: float) -> None:
        timeout_s = min(MAX_ANSWER_S, retry_for_s / 2)
        self.server = Server(url, timeout_s, key, load_functions)
        self.mutations = CommandStream(self.server, retry_for_s, renews=True)
        self.reads = CommandStream(self.server, retry_for_s)
        self.free_block_notifier = FreeBlockNotifier(self.server)
        self.mirrors: list[HeldBlocksMirror] | None = None
        self.library = ""
        """The pool's function library; empty until it is known."""
        self.listing: asyncio.Future[Any] | None = None  # the last call that listed the pool
        self.listed_at = -math.inf

    @property
    def recoverable(self) -> bool:
        """Whether lost data can be rebuilt: the store has not joined the pool, or has workers on it
        that all have a `recovery`."""
        if self.mirrors is None:
            return True
        return bool(self.mirrors) and all(each.recovery is not None for each in self.mirrors)

    def set_renew(self, renew: Renew) -> None:
        self.server.set_renew(renew, self.mutations.wake)

    async def close(self) -> None:
        await self.free_block_notifier.close()
        await self.mutations.close()
        await self.reads.close()


class RedisCalls(ABC):
    """The part of `RedisStore` that connects, calls functions and detects a loss."""

    def __init__(self, url: str, retry_for_s: float, renews: bool) -> None:
        """Use `connect`."""
        self._url = url
        self._retry_for_s = retry_for_s
        self._renews = renews
        self._pool_links: dict[str, Link] = {}
        self._set_link = Link(url, keys.POOLS, retry_for_s)
        if renews:
            self._set_link.set_renew(_follow)

    @classmethod
    async def connect(cls, url: str, *, retry_for_s: float = 5.0) -> Self:
        """Connect to the server that a URL names (see `blockstore.redis.locator`), and load the
        functions.

        An unanswered call is sent again for `retry_for_s`. Raises StoreUnavailable if the server
        does not answer, and StoreUnsuitable if it is older than Redis 7, may evict keys, is a
        replica, or has other functions of this name.
        """
        store = cls(url, retry_for_s, renews=True)
        await store._set_link.server.check_suitable()
        return store

    @classmethod
    def _single_use(cls, url: str, retry_for_s: float) -> Self:
        """Make a store like `connect`, but without a recovery: it ends if a server restarts."""
        return cls(url, retry_for_s, renews=False)

    @property
    def run_id(self) -> str:
        """Identifies the history of data of the server with the set of pools."""
        return self._set_link.server.run_id

    async def close(self) -> None:
        links = self._set_link, *self._pool_links.values()
        await asyncio.gather(*(link.close() for link in links))

    def _link(self, pool_id: str) -> Link:
        if (link := self._pool_links.get(pool_id)) is None:
            link = Link(self._url, keys.pool_tag(pool_id), self._retry_for_s)
            if self._renews:
                link.set_renew(partial(self._renew, pool_id))
            self._pool_links[pool_id] = link
        return link

    async def _run_id_of(self, pool_id: str) -> str:
        """Return the run id of the pool's server, which identifies its history of data."""
        link = self._link(pool_id)
        if link.server.run_id == "":
            await link.mutations.send("PING")
        return link.server.run_id

    # Calling

    async def _library(self, pool_id: str) -> str:
        """Return the name of the pool's function library, which the first call on a pool asks for;
        this version's if there is no such pool yet."""
        link = self._link(pool_id)
        if not link.library:
            header = keys.pool_header(pool_id), "run_id", "library"
            run_id, library = await link.reads.send("HMGET", *header)
            if run_id is None:
                return FUNCTION_LIBRARY
            link.library = PREVIOUS_LIBRARY if library is None else library.decode()
        return link.library

    async def _mutate(
        self,
        function: str,
        pool_id: str,
        *args: Argument,
        about: Collection[str] | None = None,
        record: Callable[[HeldBlocksMirror, Any], None] | None = None,
    ) -> Any:
        """Call a function that changes the pool. `about` names the holders that it changes, or is
        None if it changes the pool or a worker as a whole. `record` updates each held-blocks mirror
        on the pool with the answer."""
        link = self._link(pool_id)

        def record_all(reply: object) -> None:
            for mirror in link.mirrors or ():
                assert record is not None
                record(mirror, reply)

        command = _fcall("FCALL", await self._library(pool_id), function, pool_id, args)
        return await self._submit(
            link, link.mutations, pool_id, command, about, record and record_all
        )

    async def _read(self, function: str, pool_id: str, *args: Argument) -> Any:
        link, library = self._link(pool_id), await self._library(pool_id)
        command = _fcall("FCALL_RO", library, function, pool_id, args)
        return await self._submit(link, link.reads, pool_id, command, frozenset())

    async def _submit(
        self,
        link: Link,
        stream: CommandStream,
        pool_id: str,
        command: Command,
        about: Collection[str] | None,
        record: Record | None = None,
    ) -> Any:
        def is_loss(error: Exception) -> bool:
            if not link.recoverable:
                return False
            unknown = isinstance(error, UnknownPool | Recovering) and link.mirrors is not None
            return unknown or isinstance(error, StoreLost)

        with _detect_loss(link, pool_id):
            return await stream.submit(command, about, record, is_loss)

    def _join(self, pool_id: str, run_id: bytes) -> None:
        """Record that this store uses the pool. Raises StoreLost if the server restarted after the
        pool was made, and read an old state from a file."""
        link = self._link(pool_id)
        if run_id.decode() != link.server.run_id:
            raise link.server.mark_lost(f"pool {pool_id} is older than the server's restart")
        if link.mirrors is None:
            link.mirrors = []

    # When the server has lost its data

    @abstractmethod
    async def _renew(self, pool_id: str, run_id: str) -> None:
        """Report everything that this store's workers hold of a pool to the server with this
        run_id, and wait until the pool is rebuilt. After StoreUnavailable it is called again; other
        errors end the store."""

    def _keep_listed(self, pool_id: str) -> None:
        """Add a pool to the set of pools every now and then: the node with the set may lose it
        while the pool's node loses nothing. Nobody waits for the answer."""
        link, now = self._link(pool_id), asyncio.get_running_loop().time()
        if now < link.listed_at + LISTING_S or (link.listing and not link.listing.done()):
            return
        link.listed_at = now
        link.listing = self._set_link.mutations.submit(("SADD", keys.POOLS, pool_id))
        link.listing.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _follow(run_id: str) -> None:
    """Renew nothing: stores list their pools again."""


@contextmanager
def _detect_loss(link: Link, pool_id: str) -> Iterator[None]:
    """Raises StoreLost instead of UnknownPool if this store has registered or joined the pool."""
    try:
        yield
    except UnknownPool as error:
        if link.mirrors is not None:
            raise link.server.mark_lost(f"pool {pool_id} is gone") from error
        raise


def _fcall(
    command: str, library: str, function: str, pool_id: str, args: Sequence[Argument]
) -> Command:
    return command, f"{library}_{function}", 1, keys.pool_tag(pool_id), *args
