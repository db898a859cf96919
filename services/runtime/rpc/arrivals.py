"""Bounds the memory of messages that are still arriving over gRPC.

gRPC keeps what it has of a message until it is whole, up to 16 MiB for each call, and does not tell
how much that is. A whole message of an honest client is there at once, or as fast as its link is.
So the calls whose message takes long are bounded, for a server as a whole: beyond the bound, the
call that has waited longest gives way.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from services.runtime.errors import InvalidRequest, Overloaded
from services.runtime.rpc.error_table import RETRY_S

SLOW_S = 1.0
SLOW_IF_OPEN_S = 0.1
"""For methods that anybody may call: health checks and reflection have short messages."""
MAX_SLOW = 16
_NUM_WAITS = 2
"""A message is slow after so many waits, which share the time. After a long turn, the event loop
may see that a wait has ended before it sees the messages that have arrived; it sees these before
the end of the next wait."""


class Arrivals:
    """The messages that arrive at one server. A message is slow after `slow_s`."""

    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s
        self._slow: dict[asyncio.Timeout, None] = {}
        """Of the calls whose message takes longer than `slow_s`, the longest waiting first."""
        self._timers: dict[asyncio.Timeout, asyncio.TimerHandle] = {}

    async def message(self, context: aio.ServicerContext[Any, Any]) -> bytes:
        """The call's message. Raises InvalidRequest without one, and Overloaded if it gave way."""
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
        """The next message; None if there are no more."""
        try:
            async with asyncio.timeout(None) as limit:
                self._wait(limit, _NUM_WAITS)
                try:
                    received: Any = await context.read()
                finally:
                    self._timers.pop(limit).cancel()
                    self._slow.pop(limit, None)
        except TimeoutError as error:
            raise Overloaded(
                f"{MAX_SLOW} other messages take longer than {self._slow_s:g} s to arrive; send "
                "this one again",
                RETRY_S,
            ) from error
        return None if received is aio.EOF else received

    def _wait(self, limit: asyncio.Timeout, num_waits: int) -> None:
        """Count a call whose message takes long; beyond the bound, end the oldest one."""
        if num_waits:
            part_s, loop = self._slow_s / _NUM_WAITS, asyncio.get_running_loop()
            self._timers[limit] = loop.call_later(part_s, self._wait, limit, num_waits - 1)
            return
        self._slow[limit] = None
        if len(self._slow) > MAX_SLOW:
            oldest = next(iter(self._slow))
            del self._slow[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
