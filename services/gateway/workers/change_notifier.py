"""Wakes tasks that wait for a change of workers or requests, and loses no notification."""

import asyncio


class ChangeNotifier:
    """A counter of changes that tasks can wait for.

    A task reads `num_changes`, looks for something to do, and if there is nothing passes the number
    that it read to `wait`. A change since that read makes `wait` return at once.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.num_changes += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float | None = None) -> bool:
        """Wait until `num_changes` exceeds `seen` (True) or `timeout_s` has passed (False)."""
        if self.num_changes > seen:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
