"""The figures of the last minutes, for a page that opens only now."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

INTERVAL_S = 5.0
_NUM_SAMPLES = 120


class History:
    """A sample every five seconds of the last ten minutes. `sample` returns the numbers."""

    def __init__(self, sample: Callable[[], list[float]]) -> None:
        self._sample = sample
        self.samples: deque[list[float]] = deque(maxlen=_NUM_SAMPLES)

    async def keep(self) -> NoReturn:
        while True:
            self.samples.append(self._sample())
            await asyncio.sleep(INTERVAL_S)
