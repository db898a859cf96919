"""Messages of a stream that go together: all that is there when something can be sent is one
message, whose `more` has the others.

A message costs its writer and its reader a way through gRPC's threads and a turn of their loops
each, which is more than what it takes to say something about one request; and what one message
says is heard in one turn. A worker whose 16 requests are to move hears of all of them before its
next step.

    put   a b c         d e
    sent        [a b c]     [d e]

See ADR 90.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

MOST_BYTES = 1 << 20
"""Of what is sent together; what is larger by itself is sent alone."""

T = TypeVar("T")


class Outbox(Generic[T]):
    """What is to be sent, in order. `size`: of one, in bytes."""

    def __init__(self, size: Callable[[T], int]) -> None:
        self._size = size
        self._waiting: deque[T] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, one: T) -> None:
        """Nothing, once it is closed."""
        if not self._closed:
            self._waiting.append(one)
            self._changed.set()

    def close(self, *, drop: bool = False) -> None:
        """Nothing comes any more; `drop`: nor is sent what was put. Again: no error."""
        self._closed = True
        if drop:
            self._waiting.clear()
        self._changed.set()

    async def take(self) -> list[T]:
        """The first that go together, as soon as there is one; none: it is closed, and empty."""
        while not self._waiting and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        together: list[T] = []
        num_bytes = 0
        while self._waiting:
            num_bytes += self._size(self._waiting[0])
            if together and num_bytes > MOST_BYTES:
                break
            together.append(self._waiting.popleft())
        return together


def bundled(messages: Sequence[Any]) -> Any:
    """One message of a worker's stream, of those that go together."""
    first, *others = messages
    first.more.extend(others)
    return first


def each_of(message: Any) -> Iterator[Any]:
    """The messages that were bundled; what those may have in them counts for nothing."""
    yield message
    yield from message.more
