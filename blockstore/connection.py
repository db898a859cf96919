"""Connections to the server of a store.

`Server.open` makes single connections and checks each: either the server is the same process as
before (the same `run_id`), or `renew` has rebuilt the data that the server lacked. Without `renew`,
another `run_id` means StoreLost from then on. `translate_errors` is the one place that turns
redis-py's exceptions into those of the block store. Nothing here retries: redis-py's own retry is
off, because it would send a command again that may have been executed (see `blockstore.stream`).
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from blockstore.errors import (
    BY_CODE,
    BlockStoreError,
    OutOfBlocks,
    StoreLost,
    StoreUnavailable,
    StoreUnsuitable,
)
from blockstore.redaction import without_password

Argument = str | bytes | int
Command = Sequence[Argument]

MIN_REDIS_VERSION = (7, 0)
"""The first version with functions. Valkey reports the Redis version with which it is
compatible."""

ERRORS: dict[type[RedisError], type[BlockStoreError]] = {
    AuthenticationError: StoreUnsuitable,
    AuthorizationError: StoreUnsuitable,
    NoPermissionError: StoreUnsuitable,
    ReadOnlyError: StoreUnsuitable,
    AskError: StoreUnsuitable,
    ClusterError: StoreUnsuitable,
    OutOfMemoryError: StoreUnavailable,
    ConnectionError: StoreUnavailable,
    TimeoutError: StoreUnavailable,
    RedisError: BlockStoreError,
}
"""The block store's error for each exception of redis-py; the most specific entry counts."""

BUSY_CODES = {"BUSY", "MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN"}
"""Error replies of a server that temporarily cannot execute commands."""


def translate(url: str, error: RedisError) -> BlockStoreError:
    """Return the block store's error for an exception of redis-py. Error replies of the functions
    are `CODE text` (see `errors.BY_CODE`)."""
    if type(error) is ConnectionError and isinstance(error.__cause__, RedisError):
        error = error.__cause__  # the server's error reply while redis-py connected
    code, *rest = str(error).split() or [""]
    if code == OutOfBlocks.code:
        return OutOfBlocks(int(rest[0]), int(rest[1]))
    if code in BY_CODE:
        return BY_CODE[code](" ".join(rest))
    if "Function not found" in str(error):
        return StoreLost(f"{url} has lost the functions of the block store")
    if code in BUSY_CODES:
        return StoreUnavailable(f"{url}: {error}")
    meaning = next(ERRORS[cls] for cls in type(error).__mro__ if cls in ERRORS)
    return meaning(f"{url}: {error}")


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Raises exceptions of redis-py as errors of the block store."""
    try:
        yield
    except RedisError as error:
        raise translate(url, error) from error


def parse_info(text: bytes) -> dict[str, str]:
    """Return the fields of an INFO reply."""
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def require_suitable(url: str, info: dict[str, str]) -> None:
    """Raise StoreUnsuitable, with advice, if the server cannot hold a block store."""
    version = info["redis_version"]
    if tuple(map(int, version.split(".")[:2])) < MIN_REDIS_VERSION:
        raise StoreUnsuitable(
            f"{url} runs Redis {version}, which has no functions: run Redis 7 or newer, or Valkey"
        )
    if (mode := info.get("redis_mode", "standalone")) != "standalone":
        raise StoreUnsuitable(
            f"{url} runs in {mode} mode: give the URL of a standalone server (primary)"
        )
    if (role := info["role"]) != "master":
        raise StoreUnsuitable(f"{url} is a {role}: give the URL of its primary")
    if (policy := info["maxmemory_policy"]) != "noeviction":
        raise StoreUnsuitable(
            f"{url} may evict keys (maxmemory-policy {policy}), which would lose blocks: start it"
            " with --maxmemory-policy noeviction, or CONFIG SET maxmemory-policy noeviction"
        )


Renew = Callable[[str], Awaitable[None]]
"""Rebuilds the lost data on a server; the argument is its run_id. StoreUnavailable: call it again.
Any other error ends the store: later calls raise it."""


class Server:
    """Opens connections to one server. The server is `in_doubt` from when another process answers,
    or an answer shows that data is lost, until `open(renews=True)` has rebuilt the data; `on_doubt`
    is called when the doubt begins."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` limits connecting and each reply. StoreUnsuitable: the URL is not one for
        Redis."""
        self.url = without_password(url)
        self.run_id = ""
        self.in_doubt = False
        self._renew: Renew | None = None
        self._on_doubt: Callable[[], None] = lambda: None
        self._lost: BlockStoreError | None = None
        ours = {  # options on which this file relies; they override those in the URL
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "health_check_interval": 0,
        }
        try:
            options: dict[str, Any] = {**parse_url(url), **ours}
            self._connections = ConnectionPool(**options)
            self._new_connection()
        except (ValueError, TypeError) as exc:  # TypeError: an unknown option
            raise StoreUnsuitable(f"{self.url}: {exc}") from exc

    def set_renew(self, renew: Renew, on_doubt: Callable[[], None] = lambda: None) -> None:
        """Rebuild lost data with `renew` from now on, instead of raising StoreLost."""
        self._renew = renew
        self._on_doubt = on_doubt

    async def open(self, renews: bool = False) -> AbstractConnection:
        """Return a new connection, which the caller disconnects.

        With `renews`, rebuild lost data first. StoreLost: the server has lost its data, and there
        is no `renew`. StoreUnavailable: the server does not answer, or is in doubt and not yet
        rebuilt. StoreUnsuitable: for example, the server refuses the password. Other errors are
        those of `renew`.
        """
        self.check()
        connection = self._new_connection()
        try:
            with translate_errors(self.url):
                await connection.connect()  # type: ignore[no-untyped-call]
                info = parse_info(await ask(connection, "INFO", "server"))
            await self._check_run_id(info["run_id"], renews)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

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

    def _new_connection(self) -> AbstractConnection:
        """Return a connection object that is not connected yet."""
        connection: AbstractConnection = self._connections.make_connection()  # type: ignore[no-untyped-call]
        return connection

    def mark_lost(self, reason: str) -> BlockStoreError:
        """End the store because the server has lost its data, and return the error to raise; from
        now on `check` raises it, too."""
        return self._end(StoreLost(f"{self.url} lost the block store: {reason}"))

    def _end(self, error: BlockStoreError) -> BlockStoreError:
        """End the store with its first fatal error. The doubt ends, so that nothing renews it."""
        self._lost, self.in_doubt = self._lost or error, False
        return self._lost

    def check(self) -> None:
        """Raise the error that ended the store, if any: StoreLost, or why it could not be
        renewed."""
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)


async def ask(connection: AbstractConnection, *command: Argument) -> Any:
    """Send one command on an open connection and return its reply; raises redis-py's exceptions."""
    await connection.send_command(*command)
    return await connection.read_response()


async def read_reply(connection: AbstractConnection) -> Any:
    """Return the next reply; an error reply is returned, too. A broken connection raises."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
