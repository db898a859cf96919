"""How a connection reads and closes, as uvicorn sees it."""

import asyncio
from collections.abc import Callable, Sized
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Reads nothing while requests wait in `pipeline` behind the one that is answered, or while
    what was read waits for its turn."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline
        self._is_held = False

    def resume_reading(self) -> None:
        if not self._is_held and not self._pipeline:
            super().resume_reading()

    def hold(self) -> None:
        """What was read waits."""
        self._is_held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """It has had its turn."""
        self._is_held = False
        if not self.read_paused:
            self._transport.resume_reading()


class ClosingTransport:
    """A transport that is closed by `close`, which may take a while; `is_closing` says whether it
    does."""

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        is_closing: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self.close = close
        self.is_closing = is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
