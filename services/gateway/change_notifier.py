"""A bell: tells those who wait that something has changed, without losing a ring in between."""

import asyncio


class ChangeNotifier:
    """Read `num_changes`, look at the world, and if there is nothing to do `wait(rings)`: a ring
    after the look returns at once."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.num_changes += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float | None = None) -> bool:
        """Until there were more than `seen` rings (True) or the time is up (False)."""
        if self.num_changes > seen:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
