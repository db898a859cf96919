"""A client's gRPC connections to the gateways of one deployment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from quire.errors import translate_errors
from quire.v1.block_manager_pb2_grpc import BlockManagerStub
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.v1.supervisor_pb2_grpc import SupervisorStub

if TYPE_CHECKING:
    # The generated stubs declare async classes for type checkers only; at run time one class serves
    # both kinds of channel.
    from quire.v1.block_manager_pb2_grpc import BlockManagerAsyncStub
    from quire.v1.inference_pb2_grpc import InferenceAsyncStub
    from quire.v1.supervisor_pb2_grpc import SupervisorAsyncStub

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


class Connection:
    """A connection to one gateway, with a stub for each of its services."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.inference = InferenceStub(self.channel)
        self.block_manager = BlockManagerStub(self.channel)
        self.supervisor = SupervisorStub(self.channel)
        self.health = HealthStub(self.channel)


class AsyncConnection:
    """`Connection` for asyncio."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.inference: InferenceAsyncStub = InferenceStub(self.channel)
        self.block_manager: BlockManagerAsyncStub = BlockManagerStub(self.channel)
        self.supervisor: SupervisorAsyncStub = SupervisorStub(self.channel)
        self.health = HealthStub(self.channel)


C = TypeVar("C", Connection, AsyncConnection)


class Connections(Generic[C]):
    """Connections to the gateways of one deployment, one of them in use. `addresses`: one or more
    addresses, separated by commas."""

    def __init__(self, addresses: str, connect: Callable[[str], C]) -> None:
        self._all: list[C] = [connect(address.strip()) for address in addresses.split(",")]
        self._index = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[C]:
        return iter(self._all)

    @property
    def current(self) -> C:
        return self._all[self._index]

    @contextmanager
    def use_current(self) -> Iterator[C]:
        """Yields the connection in use, and raises gRPC's errors as errors of `quire.errors`."""
        with translate_errors(self.current.address):
            yield self.current

    def switch_from(self, connection: C) -> None:
        """Use the next gateway, unless another thread or task has already switched."""
        if connection is self.current:
            self._index = (self._index + 1) % len(self._all)
