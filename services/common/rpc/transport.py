"""gRPC as every service uses it: a server with limits, error mapping, health and reflection; a
channel with the same limits; and the way back from a status to a domain error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc import StatusCode, aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import errors
from services.common.errors import QuireError, StartupError
from services.common.rpc.error_table import PeerFailed
from services.common.rpc.interceptor import CODE_TRAILER, RETRY_TRAILER, ErrorInterceptor
from services.common.rpc.proof import Guard
from services.common.rpc.reflection import enable_reflection
from services.common.runtime.config import join_host_port

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""So large that a too long prompt gets our own error, not gRPC's."""

_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# A peer whose machine vanished is noticed within time + timeout; a dead process at once, by TCP.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Which decides here, whatever the timeout of keepalive is; 60 s by default (measured).
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A connection on which nobody speaks HTTP/2 keeps its file descriptor for so long.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Two services on one port would each get some of the connections; the second must fail.
    ("grpc.so_reuseport", 0),
)
_CHANNEL_OPTIONS = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not between two attempts: how long one may take. A busy peer needs more than a moment.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Services speak to each other directly; a proxy from the environment is not meant for them.
    ("grpc.enable_http_proxy", 0),
    # Pings that measure the bandwidth, after every message of a quiet stream: what peers send each
    # other fits the smallest window.
    ("grpc.http2.bdp_probe", 0),
    # One connection per channel: the stream of one peer must not ride on another's.
    ("grpc.use_local_subchannel_pool", 1),
)
_IDLE_CONNECTION_MS = 300_000
"""A client's channel connects again when it is used again."""
_DEFAULT_RETRY_DELAY_S = 1.0


class RpcServer:
    """A grpc.aio server. Register servicers on `.aio`, then `start`; it is NOT_SERVING until
    `set_serving(True)`.

    `services` are full names (`quire.v1.Inference`), for health checks and reflection. A server
    with a `guard` is for services of this deployment only. `max_connections`: for a port that
    strangers reach; more are closed at once.
    """

    def __init__(
        self, *services: str, guard: Guard | None = None, max_connections: int | None = None
    ) -> None:
        options = (*_SERVER_OPTIONS, *_bounds(max_connections))
        self.aio = aio.server(interceptors=[ErrorInterceptor(guard)], options=options)
        self._health = health.aio.HealthServicer()
        self._services = services
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.aio)
        enable_reflection((*services, health.SERVICE_NAME), self.aio)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that it is (another one than asked for when `port` is 0).

        StartupError: the address cannot be listened on.
        """
        bound = self._bind(host, port)
        await self._start()
        return bound

    async def start_local(self, socket: Path, host: str, port: int | None) -> int | None:
        """Listen on a Unix socket that only processes of this user may open, and on a port where
        one is given. StartupError."""
        try:
            usual = os.umask(0o077)  # a mode that is set after the bind would come too late
            try:
                socket.parent.mkdir(parents=True, exist_ok=True)
                self.aio.add_insecure_port(f"unix:{socket}")
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
            return self.aio.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {address}: in use, or not this host's address"
            ) from error

    async def _start(self) -> None:
        await self.set_serving(False)
        await self.aio.start()

    async def set_serving(self, serving: bool) -> None:
        """What health checks of the server and of each of its services answer from now on."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for service in (health.OVERALL_HEALTH, *self._services):
            await self._health.set(service, state)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, give those that run `grace_s`, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.aio.stop(grace_s)


def _bounds(max_connections: int | None) -> tuple[tuple[str, int], ...]:
    if max_connections is None:
        return ()
    return (
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
    )


def open_channel(address: str) -> aio.Channel:
    """A channel to another service's advertised address; it connects, and reconnects, by itself."""
    return aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


@contextmanager
def translated() -> Iterator[None]:
    """Around calls to another service: `grpc.aio.AioRpcError` becomes a QuireError."""
    try:
        yield
    except aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def from_rpc_error(error: aio.AioRpcError) -> QuireError:
    """The domain error that the other side raised, by its code; without one, by gRPC's status.

    PeerFailed when there is no domain error for it: raised again in a handler, it reaches the
    caller with the same status, code and text.
    """
    metadata = dict(error.trailing_metadata() or ())
    code, text = str(metadata.get(CODE_TRAILER, "")), error.details() or ""
    cls = _BY_CODE.get(code) or _BY_STATUS.get(error.code() if not code else StatusCode.OK)
    if cls is None:
        return PeerFailed(text, code or error.code().name.lower(), error.code())
    if issubclass(cls, errors.Overloaded):
        return cls(text, _retry_delay_s(metadata.get(RETRY_TRAILER)))
    return cls(text)


def _retry_delay_s(pushback_ms: str | bytes | None) -> float:
    try:
        return int(pushback_ms or "") / 1000
    except ValueError:
        return _DEFAULT_RETRY_DELAY_S


def _with_descendants(cls: type[QuireError]) -> Iterator[type[QuireError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _with_descendants(sub)


_BY_CODE = {cls.code: cls for cls in _with_descendants(QuireError) if hasattr(cls, "code")}
_BY_STATUS = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}
