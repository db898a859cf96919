"""gRPC servers and channels of all services: a server with limits, error mapping, health checks and
reflection; a channel with the same limits; and the translation of gRPC errors to domain errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc import StatusCode, aio
from grpc_health.v1 import health as rpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.sockets import join_host_port
from services.runtime import errors
from services.runtime.errors import QuireError, StartupError
from services.runtime.health import Health
from services.runtime.rpc.error_table import RETRY_S, RemoteError, error_of
from services.runtime.rpc.interceptor import CODE_TRAILER, RETRY_TRAILER, ErrorInterceptor, Guard
from services.runtime.rpc.reflection import enable_reflection
from services.runtime.rpc.tls import SERVICE_OPTIONS, TlsFiles

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Large enough that a prompt that is too long gets Quire's error, not gRPC's."""

_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# Keepalive detects within time + timeout that a host is gone; TCP reports a dead process at once.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # By measurement this timeout decides, not the one of keepalive; its default is 60 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # How long a connection may occupy a file descriptor before its HTTP/2 handshake.
    ("grpc.server_handshake_timeout_ms", 5_000),
)
_CHANNEL_OPTIONS = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the time limit of one attempt: a busy server needs a while to accept.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Services connect directly: a proxy from the environment is meant for the web.
    ("grpc.enable_http_proxy", 0),
    # No bandwidth probes: each message of a quiet stream would cause a ping, although the messages
    # of services fit into the smallest window.
    ("grpc.http2.bdp_probe", 0),
    # One connection per channel: two channels to one address must not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_IDLE_CONNECTION_MS = 300_000
"""The server closes a client's idle connection after this time; the client reconnects when it makes
the next call."""
_MAX_CONCURRENT_STREAMS = 1024
"""Calls of one client connection; further ones wait at the client. gRPC refuses streams above it
before they become calls, which makes floods of reset streams cheap."""


class RpcServer:
    """A grpc.aio server. Register servicers on `.aio`, then call `start`. Health checks get
    NOT_SERVING until `set_serving(True)`.

    `services` are full names (`quire.v1.Inference`), for health checks and reflection. `guard`
    admits or refuses each call. With `max_connections`, for ports that are open to the outside, the
    server closes further connections at once, and idle ones after 5 minutes; each connection has at
    most `_MAX_CONCURRENT_STREAMS` calls at a time. `tls` is for its TCP ports; None without TLS.
    `health` is the service's, and follows `set_serving`. With `shares_port` another process of this
    user may listen on the same port, and each gets some of the connections; otherwise a second one
    fails to start.
    """

    def __init__(
        self,
        *services: str,
        guard: Guard | None = None,
        max_connections: int | None = None,
        tls: TlsFiles | None = None,
        health: Health | None = None,
        shares_port: bool = False,
    ) -> None:
        reuse = ("grpc.so_reuseport", int(shares_port))
        options = (*_SERVER_OPTIONS, reuse, *_connection_limits(max_connections))
        self.aio = aio.server(interceptors=[ErrorInterceptor(guard)], options=options)
        self._own_health = health
        self._health = rpc_health.aio.HealthServicer()
        self._services = services
        self._credentials = None if tls is None else tls.grpc_server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.aio)
        enable_reflection((*services, rpc_health.SERVICE_NAME), self.aio)

    async def start(self, host: str, port: int) -> int:
        """Listen on `port`, or on a free port if it is 0; returns the port.

        Raises StartupError if the server cannot listen at this address.
        """
        bound = self._bind(host, port)
        await self._start()
        return bound

    async def start_local(self, socket: Path, host: str, port: int | None) -> int | None:
        """Listen on a Unix socket that only this user's processes may open, and on `port` if it is
        given; returns the port. The socket gets its name after the bind: at its end gRPC removes
        the file at the path that it has bound, and by then another process may have its socket
        there. Raises StartupError."""
        try:
            usual = os.umask(0o077)  # to set the mode after the bind would be too late
            try:
                socket.parent.mkdir(parents=True, exist_ok=True)
                bound_at = socket.with_name(f".{socket.name}")
                self.aio.add_insecure_port(f"unix:{bound_at}")
                bound_at.rename(socket)
            finally:
                os.umask(usual)
        except (OSError, RuntimeError) as error:
            raise StartupError(f"cannot listen on the socket {socket}: {error}") from error
        bound = None if port is None else self._bind(host, port)
        await self._start()
        return bound

    def _bind(self, host: str, port: int) -> int:
        address = join_host_port(host, port)
        try:
            if self._credentials is not None:
                return self.aio.add_secure_port(address, self._credentials)
            return self.aio.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {address}: in use, or not this host's address"
            ) from error

    async def _start(self) -> None:
        await self.set_serving(False)
        await self.aio.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the answer to health checks of the server and of each of its services."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for service in (rpc_health.OVERALL_HEALTH, *self._services):
            await self._health.set(service, state)
        if self._own_health is not None:
            self._own_health.is_serving = serving

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let running calls continue for `grace_s`, then cancel them."""
        await self._health.enter_graceful_shutdown()
        if self._own_health is not None:
            self._own_health.is_serving = False
        await self.aio.stop(grace_s)


def _connection_limits(max_connections: int | None) -> tuple[tuple[str, int], ...]:
    if max_connections is None:
        return ()
    return (
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        ("grpc.max_concurrent_streams", _MAX_CONCURRENT_STREAMS),
    )


def open_channel(address: str, tls: TlsFiles | None = None) -> aio.Channel:
    """A channel to the address of another service; it connects and reconnects automatically. `tls`
    is for TCP; None is no TLS."""
    if tls is None or address.startswith("unix:"):
        return aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    options = (*_CHANNEL_OPTIONS, *SERVICE_OPTIONS)
    return aio.secure_channel(address, tls.grpc_channel(), options=options)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raises each `grpc.aio.AioRpcError` of a call to another service as a domain error."""
    try:
        yield
    except aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def from_rpc_error(error: aio.AioRpcError) -> QuireError:
    """The domain error that the other service raised, found by its code, or by the gRPC status if
    there is no code; a RemoteError if there is no such domain error."""
    metadata = dict(error.trailing_metadata() or ())
    code, text = str(metadata.get(CODE_TRAILER, "")), error.details() or ""
    status = error.code()
    if code:
        return error_of(code, text, status, _retry_delay_s(metadata.get(RETRY_TRAILER)))
    cls = _BY_STATUS.get(status)
    return cls(text) if cls else RemoteError(text, status.name.lower(), status)


def _retry_delay_s(pushback_ms: str | bytes | None) -> float:
    try:
        return int(pushback_ms or "") / 1000
    except ValueError:
        return RETRY_S


_BY_STATUS: dict[StatusCode, type[QuireError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}
