"""Sends all messages that wait for a stream as one: the first message carries the others in its
field `more`.

Each gRPC message costs writer and reader a pass through gRPC's threads and a turn of the event
loop, more than the work for one request. The receiver also handles a batch in one turn: a worker
that has to move 16 requests gets all 16 commands before its next step.

    put   a b c         d e
    sent        [a b c]     [d e]
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

MAX_BATCH_BYTES = 1 << 20
"""Limit of one batch; a larger single message is sent alone."""

T = TypeVar("T")


class Outbox(Generic[T]):
    """A queue of messages to send, in order. `size` returns the bytes of a message."""

    def __init__(self, size: Callable[[T], int]) -> None:
        self._size = size
        self._waiting: deque[T] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: T) -> None:
        """Append a message; ignored if the outbox is closed."""
        if not self._closed:
            self._waiting.append(message)
            self._changed.set()

    def close(self, *, drop: bool = False) -> None:
        """Accept no more messages; with `drop`, also discard the waiting messages. May be called
        again."""
        self._closed = True
        if drop:
            self._waiting.clear()
        self._changed.set()

    async def take(self) -> list[T]:
        """Wait for a message, then take the next batch; empty if the outbox is closed and empty."""
        while not self._waiting and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        batch: list[T] = []
        num_bytes = 0
        while self._waiting:
            num_bytes += self._size(self._waiting[0])
            if batch and num_bytes > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch


def pack_batch(messages: Sequence[Any]) -> Any:
    """One message of a worker's stream that carries the whole batch."""
    first, *others = messages
    first.more.extend(others)
    return first


def unpack_batch(message: Any) -> Iterator[Any]:
    """The messages of a batch: `message`, then its `more`. A `more` inside of those is ignored."""
    yield message
    yield from message.more
