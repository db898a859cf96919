"""The primary of a store, as seen over several connections.

`Server.open` makes single connections and checks each: either the primary still has the history of
data that it had before, or `renew` has rebuilt the data that it lacks. Without `renew`, another
history means StoreLost from then on.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from blockstore.errors import BlockStoreError, NotPrimary, StoreLost, StoreUnavailable
from blockstore.redis.connection import ask, parse_info, require_suitable, translate_errors
from blockstore.redis.locator import Locator

Renew = Callable[[str], Awaitable[None]]
"""Rebuilds the lost data on the server with this run_id. After StoreUnavailable it is called again;
any other error ends the store, and later calls raise it."""

Prepare = Callable[[str, AbstractConnection], Awaitable[None]]
"""Prepares a server on the first connection; gets the URL for error texts."""


class Server:
    """Opens connections to the primary that has one key.

    The server is `in_doubt` from the moment at which another process answers, or an answer shows
    that data is lost. The doubt ends when `open(renews=True)` has rebuilt the data. `run_id`
    identifies the history of data: the primary's process and its replication id, which a failover
    changes. So a server that was a replica in between, and may have lost writes, has another one.
    """

    def __init__(
        self, url: str, timeout_s: float, key: str, prepare: Prepare | None = None
    ) -> None:
        """`timeout_s` limits connecting and each reply. Raises StoreUnsuitable if the URL is not
        one for Redis."""
        self.timeout_s = timeout_s
        self.run_id = ""
        self.process_id = ""
        self.in_doubt = False
        self._prepare = prepare
        self._renew: Renew | None = None
        self._on_doubt: Callable[[], None] = lambda: None
        self._lost: BlockStoreError | None = None
        ours: dict[str, Any] = {  # options on which a store relies
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "health_check_interval": 0,
        }
        self._locator = Locator(url, key, ours)
        self.url = self._locator.url

    def set_renew(self, renew: Renew, on_doubt: Callable[[], None] = lambda: None) -> None:
        """Rebuild lost data with `renew` from now on, instead of raising StoreLost."""
        self._renew = renew
        self._on_doubt = on_doubt

    async def check_suitable(self) -> None:
        """Make the first connection, and close it. Raises StoreUnavailable or StoreUnsuitable."""
        await (await self.open()).disconnect()

    async def open(self, renews: bool = False) -> AbstractConnection:
        """Return a new connection, which the caller disconnects. The first one checks whether the
        server can hold a block store, and prepares it.

        With `renews`, rebuild lost data first. Raises StoreLost if the server has lost its data and
        nothing can rebuild it; StoreUnavailable if the server does not answer, or is in doubt;
        StoreUnsuitable if, for example, the server refuses the password; the errors of `renew`.
        """
        self.check()
        connection, info = await self._locator.connect()
        try:
            if self.run_id == "":
                await self._check_first(connection, info)
            elif info["role"] != "master":
                raise NotPrimary(f"{self.url} is a replica now")
            run_id = f"{info['run_id']}.{info['master_replid']}"
            await self._check_run_id(run_id, renews)
            self.process_id = info["run_id"]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _check_first(self, connection: AbstractConnection, info: dict[str, str]) -> None:
        with translate_errors(self.url):
            memory = parse_info(await ask(connection, "INFO", "memory"))
        require_suitable(self.url, info | memory)
        if self._prepare is not None:
            await self._prepare(self.url, connection)

    def mark_in_doubt(self) -> None:
        """Record that the server has lost data; the next `open(renews=True)` rebuilds it."""
        if not self.in_doubt and self._lost is None:
            self.in_doubt = True
            self._on_doubt()

    async def _check_run_id(self, run_id: str, renews: bool) -> None:
        self.check()
        if self.run_id not in ("", run_id):
            if self._renew is None:
                raise self.mark_lost("it was restarted, or replaced by another one")
            self.mark_in_doubt()
        if self.in_doubt:
            if not renews or self._renew is None:
                raise StoreUnavailable(f"{self.url} has lost data, which is being rebuilt")
            try:
                await self._renew(run_id)
            except StoreUnavailable:
                raise
            except BlockStoreError as error:
                self._end(error)
                raise
        self.run_id, self.in_doubt = run_id, False

    def mark_lost(self, reason: str) -> BlockStoreError:
        """End the store because the server has lost its data, and return the error to raise; from
        now on `check` raises it, too."""
        return self._end(StoreLost(f"{self.url} lost the block store: {reason}"))

    def _end(self, error: BlockStoreError) -> BlockStoreError:
        """End the store with its first fatal error. The doubt ends, so that nothing renews it."""
        self._lost, self.in_doubt = self._lost or error, False
        return self._lost

    def check(self) -> None:
        """Raise the error that ended the store, if any: StoreLost, or the error of `renew`."""
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)
