"""Connections of a client to the gateways of one deployment."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from quire.v1.block_manager_pb2_grpc import BlockManagerStub
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.v1.supervisor_pb2_grpc import SupervisorStub

if TYPE_CHECKING:
    # The generated stubs know them as types only: at run time one class serves both.
    from quire.v1.block_manager_pb2_grpc import BlockManagerAsyncStub
    from quire.v1.inference_pb2_grpc import InferenceAsyncStub
    from quire.v1.supervisor_pb2_grpc import SupervisorAsyncStub

_MAX_MESSAGE_BYTES = 16 << 20
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A gateway is reached directly: an http_proxy in the environment is for the web.
    ("grpc.enable_http_proxy", 0),
    # A gateway whose machine vanished is noticed within 15 s; a dead process at once, by TCP.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One that comes back is found within a second, not after a pause that doubles every time.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each client has a connection of its own: one that is slow holds up none of the others.
    ("grpc.use_local_subchannel_pool", 1),
]


class Link:
    """A connection to one gateway."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.inference = InferenceStub(self.channel)
        self.block_manager = BlockManagerStub(self.channel)
        self.supervisor = SupervisorStub(self.channel)
        self.health = HealthStub(self.channel)


class AsyncLink:
    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.inference: InferenceAsyncStub = InferenceStub(self.channel)
        self.block_manager: BlockManagerAsyncStub = BlockManagerStub(self.channel)
        self.supervisor: SupervisorAsyncStub = SupervisorStub(self.channel)
        self.health = HealthStub(self.channel)


L = TypeVar("L")


class Links(Generic[L]):
    """Gateways of one deployment, one of them in use."""

    def __init__(self, address: str, connect: Callable[[str], L]) -> None:
        self._all: list[L] = [connect(one.strip()) for one in address.split(",")]
        self._index = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[L]:
        return iter(self._all)

    @property
    def current(self) -> L:
        return self._all[self._index]

    def leave(self, link: L) -> None:
        """Use the next gateway, unless somebody has turned to another one already."""
        if link is self.current:
            self._index = (self._index + 1) % len(self._all)
