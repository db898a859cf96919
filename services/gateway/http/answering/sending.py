"""Sends answers: JSON as a whole, or server-sent events. Both end when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

_LINE_ENDS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\x85\u2028\u2029"}
"""Characters that clients such as httpx take for the end of a line, and their JSON escapes."""

CLIENT_GONE = 499
"""Status of an answer to a client that has disconnected, as in nginx."""

DEFAULT_STREAM_PING_S = 15.0
"""How long a stream may be silent before it sends a comment, since proxies end a connection that is
silent for 30 to 60 s."""
_HEADERS_AFTER_S = 1.0
"""The time for which a stream without an event keeps its headers back, since nearly all errors come
sooner and can still set the status."""


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


COMMENT = b": ping\n\n"


class EventStream(Response):
    """Sends each of `events` as it comes, and then `[DONE]`. If `is_named`, each event is named by
    its type, as in OpenAI's Responses API and in Anthropic's, and there is no `[DONE]`. An event of
    bytes is sent as it is.

    The headers leave with the first event, or after a second without one. Before that, an error
    sets the answer's status; a later error becomes the last event, made by `error_event`. The
    generator is closed as soon as the client disconnects, not at the next event.

    After `ping_s` of silence the stream sends `ping`, which clients skip, so that proxies do not
    cut the connection. With 0 it sends none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None] | AsyncGenerator[bytes, None],
        error_event: Callable[[Exception], dict[str, Any]],
        ping_s: float,
        *,
        is_named: bool = False,
        ping: bytes = COMMENT,
    ) -> None:
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: a proxy must pass each event on at once and not collect them.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._error_event = error_event
        self._ping_s = ping_s
        self._is_named = is_named
        self._ping = ping
        self._has_begun = False
        self._is_silent = True
        """Whether no event has come since the last ping."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        keeping = asyncio.create_task(self._keep_open(send))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._is_silent = False
                    if not self._has_begun:
                        await self._begin(send)
                    await send(_part(self._encoded(event)))
            last = b"" if self._is_named else b"data: [DONE]\n\n"
        except Exception as error:
            if not self._has_begun:
                raise
            last = self._encoded(self._error_event(error))
        finally:
            keeping.cancel()
        await self._begin(send)
        await send(_part(last, more=False))

    async def _keep_open(self, send: Send) -> None:
        await asyncio.sleep(_HEADERS_AFTER_S)
        await self._begin(send)
        while self._ping_s:
            self._is_silent = True
            await asyncio.sleep(self._ping_s)
            if self._is_silent:
                await send(_part(self._ping))

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    def _encoded(self, event: dict[str, Any] | bytes) -> bytes:
        if isinstance(event, bytes):
            return event
        name = b"event: %b\n" % event["type"].encode() if self._is_named else b""
        data = to_json(event)
        for mark, escaped in _LINE_ENDS.items():
            data = data.replace(mark, escaped)
        return b"%bdata: %b\n\n" % (name, data)


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if the client disconnects first; then `work` has been
    cancelled and has ended. The caller must have read the request's body before."""
    try:
        async with asyncio.timeout(None) as limit:
            leaving = asyncio.create_task(_expire_at_disconnect(receive, limit))
            try:
                return await work
            finally:
                leaving.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        return None


async def _expire_at_disconnect(receive: Receive, limit: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    limit.reschedule(asyncio.get_running_loop().time())
