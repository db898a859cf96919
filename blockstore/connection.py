"""Connections to the one server that a store began with.

`Server.open` hands out single connections and vouches for each: the server behind it is the one of
the connections before (by its `run_id`), or `renew` has brought back what it did not know; without
`renew`, StoreLost for ever. What redis-py raises becomes one of ours
in one place, `translated`. Nothing here retries: redis-py's own retry is off, since it would send
what is not known to have failed (see `blockstore.stream`).
"""

import re
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

Argument = str | bytes | int
Command = Sequence[Argument]

MIN_REDIS_VERSION = (7, 0)
"""The first with functions. Valkey answers the Redis version that it is compatible with."""

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
"""What an exception of redis-py means; the most specific entry counts."""

BUSY_CODES = {"BUSY", "MISCONF", "LOADING", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN"}
"""Error replies of a server that cannot answer at the moment."""


def translate(url: str, error: RedisError) -> BlockStoreError:
    """What redis-py raised, as an error of the block store. Error replies of our functions are
    `CODE text` (see `errors.BY_CODE`)."""
    if type(error) is ConnectionError and isinstance(error.__cause__, RedisError):
        error = error.__cause__  # what the server answered while redis-py was connecting
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
def translated(url: str) -> Iterator[None]:
    """Raise what redis-py raises inside as an error of the block store."""
    try:
        yield
    except RedisError as error:
        raise translate(url, error) from error


def redacted(url: str) -> str:
    """The URL without its passwords, for texts and logs."""
    without_user_password = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", without_user_password)


def parse_info(text: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def require_suitable(url: str, info: dict[str, str]) -> None:
    """Raise StoreUnsuitable, with what to do about it, for a server that cannot carry the store."""
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
"""Tells a server, of this run_id, what it has lost. Raises StoreUnavailable (to be done again), or
what then ends the store."""


class Server:
    """Opens connections to one server. It is `in_doubt` when it is another one now, or answers as
    if it were; `on_doubt` is called then. Only who opens with `renews` ends the doubt."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s`: to connect, and for each answer. StoreUnsuitable: no URL for Redis."""
        self.url = redacted(url)
        self.run_id = ""
        self.in_doubt = False
        self._renew: Renew | None = None
        self._on_doubt: Callable[[], None] = lambda: None
        self._lost: BlockStoreError | None = None
        ours = {  # what this file relies on, whatever the URL says
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
        except (ValueError, TypeError) as exc:  # TypeError: an option that is none
            raise StoreUnsuitable(f"{self.url}: {exc}") from exc

    def renewed_by(self, renew: Renew, on_doubt: Callable[[], None] = lambda: None) -> None:
        """Follow the server from loss to loss."""
        self._renew = renew
        self._on_doubt = on_doubt

    async def open(self, renews: bool = False) -> AbstractConnection:
        """A new connection, the caller's to disconnect.

        StoreLost: another server answers. StoreUnavailable: nobody does, or the server is in doubt.
        StoreUnsuitable: as it says.
        """
        self.check()
        with translated(self.url):
            connection = self._new_connection()
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                info = parse_info(await ask(connection, "INFO", "server"))
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
        try:
            await self._vouch_for(info["run_id"], renews)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    def doubt(self) -> None:
        """The server does not know what it should; the next who opens with `renews` sees to it."""
        if not self.in_doubt and self._lost is None:
            self.in_doubt = True
            self._on_doubt()

    async def _vouch_for(self, run_id: str, renews: bool) -> None:
        self.check()
        if self.run_id not in ("", run_id):
            if self._renew is None:
                raise self.lose("it was restarted, or replaced by another one")
            self.doubt()
        if self.in_doubt:
            if not renews or self._renew is None:
                raise StoreUnavailable(f"{self.url} is being told what it has lost")
            try:
                await self._renew(run_id)
            except StoreUnavailable:
                raise
            except BlockStoreError as error:
                self._end(error)
                raise
        self.run_id, self.in_doubt = run_id, False

    def _new_connection(self) -> AbstractConnection:
        """Not connected yet."""
        connection: AbstractConnection = self._connections.make_connection()  # type: ignore[no-untyped-call]
        return connection

    def lose(self, reason: str) -> BlockStoreError:
        """Remember that what the server knew is gone; from now on `check` raises."""
        return self._end(StoreLost(f"{self.url} lost the block store: {reason}"))

    def _end(self, error: BlockStoreError) -> BlockStoreError:
        """Nothing is in doubt any more, and nobody tries to renew what has ended."""
        self._lost, self.in_doubt = self._lost or error, False
        return self._lost

    def check(self) -> None:
        """Raise StoreLost when the store has been lost, or why it could not be renewed."""
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args)


async def ask(connection: AbstractConnection, *command: Argument) -> Any:
    """Send one command on an open connection and read its reply; raises what redis-py raises."""
    await connection.send_command(*command)
    return await connection.read_response()


async def read_reply(connection: AbstractConnection) -> Any:
    """The next reply; an error reply is returned, a broken connection raised."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
