"""Bounds the memory of messages that are still arriving over gRPC.

gRPC keeps what it has of a message until it is whole, up to 16 MiB for each call, and does not tell
how much that is. A whole message of an honest client is there at once, or as fast as its link is.
So the calls whose message takes long are bounded, for a server as a whole: beyond the bound, the
call that has waited longest gives way. See ADR 198.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from services.common.errors import InvalidRequest, Overloaded
from services.common.rpc.error_table import RETRY_S

SLOW_S = 1.0
SLOW_IF_OPEN_S = 0.1
"""For methods that anybody may call: health checks and reflection have short messages."""
MAX_SLOW = 16


class Arrivals:
    """The messages that arrive at one server. `slow_s`: after this time a message is slow."""

    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s
        self._slow: dict[asyncio.Timeout, None] = {}
        """Of the calls whose message takes longer than `slow_s`, the longest waiting first."""

    async def message(self, context: aio.ServicerContext[Any, Any]) -> bytes:
        """The call's message. InvalidRequest: there is none. Overloaded: it gave way."""
        received = await self._next(context)
        if received is None:
            raise InvalidRequest("the call has no message")
        return received

    async def messages(
        self, context: aio.ServicerContext[Any, Any], decode: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """All messages of the call. Raises Overloaded."""
        while (received := await self._next(context)) is not None:
            yield decode(received)

    async def _next(self, context: aio.ServicerContext[Any, Any]) -> bytes | None:
        """The next message; None: there are no more."""
        try:
            async with asyncio.timeout(None) as limit:
                timer = asyncio.get_running_loop().call_later(self._slow_s, self._bound, limit)
                try:
                    received: Any = await context.read()
                finally:
                    timer.cancel()
                    self._slow.pop(limit, None)
        except TimeoutError as error:
            raise Overloaded(
                f"{MAX_SLOW} other messages take longer than {self._slow_s:g} s to arrive; send "
                "this one again",
                RETRY_S,
            ) from error
        return None if received is aio.EOF else received

    def _bound(self, limit: asyncio.Timeout) -> None:
        """Count a call whose message takes long; beyond the bound, end the oldest one."""
        self._slow[limit] = None
        if len(self._slow) > MAX_SLOW:
            oldest = next(iter(self._slow))
            del self._slow[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
