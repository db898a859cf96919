"""A client's gRPC connections to the gateways of one deployment."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from quire.error_translation import translate_errors
from quire.errors import BadTls, QuireError
from quire.v1.adapters_pb2_grpc import AdaptersStub
from quire.v1.block_manager_pb2_grpc import BlockManagerStub
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.v1.supervisor_pb2_grpc import SupervisorStub

_MAX_MESSAGE_BYTES = 16 << 20
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Connect directly: an http_proxy in the environment is meant for the web.
    ("grpc.enable_http_proxy", 0),
    # Notice within 15 s that a gateway's machine is gone; TCP reports a dead process at once.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Find a gateway that returns within a second; gRPC's default backoff doubles every time.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each client has its own connection, so a slow client delays no other.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Tls:
    """The files for TLS to gateways."""

    ca: Path | None = None
    """The CA that signed the gateways' certificates; None for the CAs that gRPC comes with."""
    certificate: Path | None = None
    """The certificate to show to gateways that ask for one, with its `key`."""
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises BadTls if a file cannot be read, or only one of certificate and key is given."""
        if (self.certificate is None) != (self.key is None):
            raise BadTls("TLS needs both a certificate and its key, or neither")
        ca, key, certificate = map(_content, (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def context(self) -> ssl.SSLContext:
        """Return the same for HTTP. Raises BadTls."""
        self.credentials()  # checks that the files go together and can be read
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise BadTls(f"the TLS files cannot be used: {error}") from error
        return context


def _content(file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise BadTls(f"TLS: cannot read {file}: {error.strerror}") from error


class _WithKey:
    """Makes the calls of a channel, of either kind, with an API key."""

    def __init__(self, channel: Any, api_key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.unary_unary(*args, **kwargs), metadata=self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._channel.unary_stream(*args, **kwargs), metadata=self._metadata)


class Connection:
    """A connection to one gateway, with a stub for each of its services. `library` is `grpc` or
    `grpc.aio`. A Unix socket needs no TLS."""

    def __init__(self, address: str, api_key: str | None, tls: Tls | None, library: Any) -> None:
        self.address = address
        if tls is None or address.startswith("unix:"):
            self.channel = library.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            credentials = tls.credentials()
            self.channel = library.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        channel: Any = self.channel if api_key is None else _WithKey(self.channel, api_key)
        # Not typed, because one class of stubs serves both kinds of channel.
        self.inference: Any = InferenceStub(channel)
        self.block_manager: Any = BlockManagerStub(channel)
        self.supervisor: Any = SupervisorStub(channel)
        self.adapters: Any = AdaptersStub(channel)
        self.health: Any = HealthStub(channel)


class Connections:
    """Connections to the gateways of one deployment, one of them in use. `addresses` is one or more
    addresses, separated by commas."""

    def __init__(self, addresses: str, api_key: str | None, tls: Tls | None, library: Any) -> None:
        names = map(str.strip, addresses.split(","))
        self._all = [Connection(address, api_key, tls, library) for address in names]
        self._index = 0
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all)

    @property
    def current(self) -> Connection:
        """Raises QuireError in a forked child."""
        self.check_process()
        return self._all[self._index]

    @property
    def are_forked(self) -> bool:
        """Whether this process is a forked child of the process that made the connections."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises QuireError in a forked child, where gRPC's threads do not run: a call would wait
        for ever, and closing a connection would close the parent's."""
        if self.are_forked:
            raise QuireError(
                f"this client belongs to process {self._pid}, and this is its forked child: make "
                "the client in the child, and start the child with multiprocessing's method "
                "'spawn'",
                "forked",
            )

    @contextmanager
    def use_current(self) -> Iterator[Connection]:
        """Yields the connection in use, and raises gRPC's errors as errors of `quire.errors`."""
        with translate_errors(self.current.address):
            yield self.current

    def switch_from(self, connection: Connection) -> None:
        """Use the next gateway, unless another thread or task has already switched."""
        if connection is self.current:
            self._index = (self._index + 1) % len(self._all)
