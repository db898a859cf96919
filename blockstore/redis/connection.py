"""Commands and errors on a connection to a server.

`translate_errors` is the one place that turns redis-py's exceptions into errors of the block store.
Nothing here retries: redis-py's own retry is off, because it would send a command again that may
have been executed (see `blockstore.redis.stream`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
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
    NotPrimary,
    OutOfBlocks,
    StoreLost,
    StoreUnavailable,
    StoreUnsuitable,
)

Argument = str | bytes | int
Command = Sequence[Argument]

MIN_REDIS_VERSION = (7, 0)
"""The first version with functions. Valkey reports the Redis version with which it is
compatible."""

ERRORS: dict[type[RedisError], type[BlockStoreError]] = {
    AuthenticationError: StoreUnsuitable,
    AuthorizationError: StoreUnsuitable,
    NoPermissionError: StoreUnsuitable,
    ReadOnlyError: NotPrimary,
    AskError: NotPrimary,
    ClusterDownError: NotPrimary,
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


def server_mode(info: dict[str, str]) -> str:
    """Return "standalone", "cluster" or "sentinel" from INFO's section "server"."""
    return info.get("server_mode") or info.get("redis_mode", "standalone")  # Valkey, Redis


def require_suitable(url: str, info: dict[str, str]) -> None:
    """Raise StoreUnsuitable, with advice, if the server cannot hold a block store."""
    version = info["redis_version"]
    if tuple(map(int, version.split(".")[:2])) < MIN_REDIS_VERSION:
        raise StoreUnsuitable(
            f"{url} runs Redis {version}, which has no functions: run Redis 7 or newer, or Valkey"
        )
    if server_mode(info) == "sentinel":
        raise StoreUnsuitable(f"{url} is a sentinel: write sentinel://HOST:26379/SERVICE")
    if (role := info["role"]) != "master":
        raise StoreUnsuitable(f"{url} is a {role}: give the URL of its primary")
    if (policy := info["maxmemory_policy"]) != "noeviction":
        raise StoreUnsuitable(
            f"{url} may evict keys (maxmemory-policy {policy}), which would lose blocks: start it"
            " with --maxmemory-policy noeviction, or CONFIG SET maxmemory-policy noeviction"
        )


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
