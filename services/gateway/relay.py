"""Passes the block manager's operations on, unchanged, to the block manager in the registry.

Messages are not even decoded: an operation that a later block manager has needs nothing here but
its name in the service's description.
"""

from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from blockstore.registry import Member
from quire.v1 import block_manager_pb2
from services.common.errors import QuireError, Unavailable
from services.common.interceptor import CODE_TRAILER
from services.common.rpc import from_rpc_error, open_channel

_SERVICE = block_manager_pb2.DESCRIPTOR.services_by_name["BlockManager"]
SERVICE_NAME: str = _SERVICE.full_name

_PASSED_ON = ("x-request-id",)


class BlockManagerRelay:
    """`find` answers the block manager as the registry has it now."""

    def __init__(self, find: Callable[[], Member | None]) -> None:
        self._find = find
        self._address = ""
        self._channel: aio.Channel | None = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """One handler per operation, bytes in and bytes out."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                method.name: grpc.unary_unary_rpc_method_handler(self._operation(method.name))
                for method in _SERVICE.methods
            },
        )

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _operation(self, name: str) -> Callable[[bytes, Any], Any]:
        async def call(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
            channel = await self._channel_to_manager()
            relayed: Any = channel.unary_unary(f"/{SERVICE_NAME}/{name}")
            try:
                answer: bytes = await relayed(
                    request, timeout=context.time_remaining(), metadata=_metadata(context)
                )
            except aio.AioRpcError as error:
                raise _as_ours(error) from error
            return answer

        return call

    async def _channel_to_manager(self) -> aio.Channel:
        """Unavailable: there is no block manager now; requests do not need one."""
        member = self._find()
        if member is None:
            raise Unavailable("the block manager is not there; try again")
        if self._channel is None or member.address != self._address:
            await self.close()
            self._address = member.address
            self._channel = open_channel(member.address)
        return self._channel


def _as_ours(error: aio.AioRpcError) -> QuireError:
    """The block manager's own error as it is; gRPC's, when nobody answers, in words."""
    said_by_it = any(key == CODE_TRAILER for key, _ in error.trailing_metadata() or ())
    if error.code() is grpc.StatusCode.UNAVAILABLE and not said_by_it:
        return Unavailable("the block manager does not answer; try again")
    return from_rpc_error(error)


def _metadata(context: aio.ServicerContext[Any, Any]) -> tuple[tuple[str, str | bytes], ...]:
    received = context.invocation_metadata() or ()
    return tuple((key, value) for key, value in received if key in _PASSED_ON)
