"""The feed: one document of the deployment's state, sent to all viewers as it is now.

While someone views, a task builds the document twice a second. All viewers get the same bytes. A
viewer that has not taken a document when the next one is there skips it, so no queue grows for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from pydantic_core import to_json

from services.gateway.workers.change_notifier import ChangeNotifier
from services.runtime.errors import Overloaded
from services.runtime.ticks import until_tick

INTERVAL_S = 0.5
MAX_VIEWERS = 32


class Feed:
    """`build` makes the document, every `interval_s`. It is not called while nobody views."""

    def __init__(
        self, build: Callable[[], Awaitable[dict[str, Any]]], interval_s: float = INTERVAL_S
    ) -> None:
        self._build = build
        self._interval_s = interval_s
        self._event = b""
        self._number = 0
        self._num_viewers = 0
        self._changes = ChangeNotifier()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the feed closes. Raises Overloaded if there are too many viewers."""
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages view this dashboard; close one", 1.0)
        self._num_viewers += 1
        try:
            seen = 0
            while await self._newer_than(seen):
                seen = self._number
                yield self._event
        finally:
            self._num_viewers -= 1
            if not self._num_viewers and self._task is not None:
                self._task.cancel()
                self._task, self._number = None, 0

    def close(self) -> None:
        """End all streams, so that they do not delay the gateway's end."""
        self._closed = True
        self._changes.notify()

    async def _newer_than(self, number: int) -> bool:
        """Wait for an update after this one. False: the feed has closed. Raises the error of
        `build`, if it has failed."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="dashboard feed")
            self._task.add_done_callback(lambda _: self._changes.notify())
        while not self._closed and self._number <= number:
            if self._task is not None and self._task.done():
                self._task.result()
            await self._changes.wait(self._changes.num_changes)
        return not self._closed

    async def _run(self) -> None:
        while True:
            # The name tells pages of the version before that the event is no change of a document.
            self._event = b"event: whole\ndata: %b\n\n" % to_json(await self._build())
            self._number += 1
            self._changes.notify()
            await asyncio.sleep(until_tick(self._interval_s))
