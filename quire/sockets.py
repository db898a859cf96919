"""Sockets of gateways that serve operations: one a gateway, in the run's directory.

A gateway that starts again has the same socket. The next gateway that starts removes sockets that
others left behind, such as a container that was killed and made anew.
"""

import hashlib
import socket
import time
from pathlib import Path

_PATTERN = "operations-*.sock"
_CONNECT_LIMIT_S = 1.0
_NEW_S = 10.0
"""A socket is there a moment before somebody listens on it."""


def operations_socket(run: Path, host: str, port: int) -> Path:
    """Of the gateway whose gRPC server listens there: `host` tells apart those of containers that
    share the directory. A path of a socket has 107 bytes at most, so the name is short."""
    name = hashlib.sha256(f"{host}:{port}".encode()).hexdigest()[:8]
    return run / f"operations-{name}.sock"


def living_sockets(run: Path) -> list[Path]:
    """Those that somebody listens on, oldest first."""
    return [path for path in _sockets(run) if _is_listening(path)]


def remove_dead_sockets(run: Path) -> None:
    for path in _sockets(run):
        if time.time() - _made_at(path) > _NEW_S and not _is_listening(path):
            path.unlink(missing_ok=True)


def _sockets(run: Path) -> list[Path]:
    return sorted(run.glob(_PATTERN), key=_made_at)


def _made_at(path: Path) -> float:
    """In Unix time; of one that was removed just now: this moment."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_LIMIT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
