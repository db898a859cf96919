"""Whether a service serves, as its metrics port tells at `/health`."""

import asyncio
import threading

_LIMIT_S = 2.0


class Health:
    """Create it in the service's event loop; other threads may ask it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_serving = False

    def is_well(self) -> bool:
        """Whether the service serves and its event loop answers. Blocks for 2 s at most."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            return False
        return answered.wait(_LIMIT_S) and self.is_serving
