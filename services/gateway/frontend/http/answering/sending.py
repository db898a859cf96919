"""Sends answers: JSON as a whole, or server-sent events. Both end when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_GONE = 499
"""Status of an answer whose client has disconnected, as in nginx."""


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Sends each of `events` as it comes. `error_event`: of an error after the first event; None:
    `events` report errors by themselves, and each event is named by its type, as in OpenAI's
    Responses API. Otherwise `[DONE]` is the last one.

    The headers wait for the first event. So an error before that event still sets the answer's
    status; a later error becomes the last event, `{"error": ...}`. The generator is closed as soon
    as the client disconnects, not at the next event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        error_event: Callable[[Exception], dict[str, Any]] | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: a proxy must pass each event on at once and not collect them.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_event(send, first)
            try:
                async for event in events:
                    await self._send_event(send, event)
                last = b"" if self._error_event is None else b"data: [DONE]\n\n"
            except Exception as error:
                if self._error_event is None:
                    raise
                last = b"data: %b\n\n" % to_json(self._error_event(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_event(self, send: Send, event: dict[str, Any]) -> None:
        name = b"" if self._error_event is not None else b"event: %b\n" % event["type"].encode()
        body = b"%bdata: %b\n\n" % (name, to_json(event))
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client disconnects first: then `work` is cancelled, and
    has ended when this function returns. The caller must have read the request's body before."""
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
