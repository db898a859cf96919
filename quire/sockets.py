"""Sockets of gateways: sockets of ports, and Unix sockets for operations in the run's directory.

A gateway that restarts uses the same path again. During an upgrade the new gateway has a path of
its own until it serves, so that the old gateway keeps its path if the new one never serves. A
starting gateway removes the sockets of dead gateways, such as the socket of a container that was
killed and replaced.
"""

import hashlib
import os
import socket
import struct
import time
from pathlib import Path

_PATTERN = "operations-*.sock"
_CONNECT_LIMIT_S = 1.0
_CREDENTIALS = struct.Struct("iII")
"""The process, the user and the group of a Unix socket's other end, as the kernel reports them."""
_NEW_S = 10.0
"""A younger socket counts as alive: it exists a moment before its gateway listens on it."""


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a listening socket. `::` takes IPv4 too, as gRPC's listeners do. Raises OSError."""
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=backlog,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def operations_socket(run: Path, host: str, port: int) -> Path:
    """The socket of the gateway whose gRPC server listens at `host`:`port`.

    `host` distinguishes containers that share the directory. The name is a short hash because the
    path of a Unix socket has at most 107 bytes.
    """
    name = hashlib.sha256(f"{host}:{port}".encode()).hexdigest()[:8]
    return run / f"operations-{name}.sock"


def starting_socket(run: Path, host: str, port: int) -> Path:
    """The path for a gateway that starts as this process: `operations_socket`, or a path of its
    own while another gateway listens there."""
    path = operations_socket(run, host, port)
    if _listener(path) is None:
        return path
    return operations_socket(run, f"{host}, process {os.getpid()}", port)


def socket_of(run: Path, pid: int | None) -> Path | None:
    """The socket on which a process listens; None if it listens on none."""
    return next((path for path in _sockets(run) if pid and _listener(path) == pid), None)


def living_sockets(run: Path) -> list[Path]:
    """The sockets that a gateway listens on, oldest first."""
    return [path for path in _sockets(run) if _listener(path) is not None]


def remove_dead_sockets(run: Path) -> None:
    for path in _sockets(run):
        if time.time() - _made_at(path) > _NEW_S and _listener(path) is None:
            path.unlink(missing_ok=True)


def _sockets(run: Path) -> list[Path]:
    return sorted(run.glob(_PATTERN), key=_made_at)


def _made_at(path: Path) -> float:
    """Return when the socket was made; the current time if it has just been removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _listener(path: Path) -> int | None:
    """The id of the process that listens on a socket, 0 if it is in another container; None if
    nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_LIMIT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _uid, _gid = _CREDENTIALS.unpack(credentials)
    return int(pid)
