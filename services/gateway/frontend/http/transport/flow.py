"""The flow control and the transport that uvicorn sees instead of its own."""

import asyncio
from collections.abc import Callable, Sized
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Flow control that does not resume reading in two more cases: while pipelined requests wait
    for the current answer, and while bytes that were read wait for the pacer."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline
        self._is_held = False

    def resume_reading(self) -> None:
        if not self._is_held and not self._pipeline:
            super().resume_reading()

    def hold(self) -> None:
        """Stops reading: the bytes that were read wait for the pacer."""
        self._is_held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Ends `hold`."""
        self._is_held = False
        if not self.read_paused:
            self._transport.resume_reading()


class ClosingTransport:
    """A transport with another `close`, which may take a while; `is_closing` is true meanwhile."""

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
