"""The feed: one document of the deployment's state, sent to all viewers as JSON merge patches.

While someone views, a task builds the document twice a second and makes one patch (RFC 7386) from
the document before. All viewers get the same bytes. A viewer that has not taken an update when the
next one is there skips it: its next event is the whole document, so no queue grows for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from pydantic_core import to_json

from services.gateway.workers.change_notifier import ChangeNotifier
from services.runtime.errors import Overloaded
from services.runtime.ticks import until_tick

INTERVAL_S = 0.5
MAX_VIEWERS = 32

Document = Mapping[str, Any]


def merge_patch(old: Document, new: Document) -> dict[str, Any]:
    """The merge patch that makes `new` from `old`: null removes a key, so no value is null."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            if change := merge_patch(before, value):
                patch[key] = change
        elif before != value:
            patch[key] = value
    return patch


class Feed:
    """`build` makes the document. It is not called while nobody views."""

    def __init__(self, build: Callable[[], Awaitable[Document]]) -> None:
        self._build = build
        self._document: Document = {}
        self._number = 0
        self._patch = b""
        self._whole = b""
        self._num_viewers = 0
        self._changes = ChangeNotifier()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the feed closes. Overloaded: too many viewers."""
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages view this dashboard; close one", 1.0)
        self._num_viewers += 1
        try:
            seen = 0
            while await self._newer_than(seen):
                is_next = seen and seen == self._number - 1
                seen = self._number
                yield self._patch if is_next else self._snapshot()
        finally:
            self._num_viewers -= 1
            if not self._num_viewers and self._task is not None:
                self._task.cancel()
                self._task, self._document, self._number = None, {}, 0

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
            document = await self._build()
            self._patch = _event("patch", merge_patch(self._document, document))
            self._document, self._whole = document, b""
            self._number += 1
            self._changes.notify()
            await asyncio.sleep(until_tick(INTERVAL_S))

    def _snapshot(self) -> bytes:
        """The whole document, which is encoded only if a viewer needs it."""
        self._whole = self._whole or _event("whole", self._document)
        return self._whole


def _event(name: str, data: Document) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))
