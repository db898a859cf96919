"""A bell: tells those who wait that something has changed, without losing a ring in between."""

import asyncio


class Bell:
    """Read `rings`, look at the world, and if there is nothing to do `wait(rings)`: a ring after
    the look returns at once."""

    def __init__(self) -> None:
        self.rings = 0
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self.rings += 1
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, heard: int, timeout_s: float | None = None) -> bool:
        """Until there were more than `heard` rings (True) or the time is up (False)."""
        if self.rings > heard:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return False
        return True
