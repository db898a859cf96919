"""The worker's writes to the block store, in order, in the background of the step loop."""

import asyncio
from collections.abc import Awaitable, Callable

from blockstore.errors import BlockStoreError

Write = Callable[[], Awaitable[None]]


class StoreWriter:
    """Starts writes in the order of `put`.

    Each write must call the store before it awaits anything else, since the store keeps the order
    in which its operations are called. If the ledger refuses a write (a broken law) or the store is
    lost, the worker has to end: `on_failure` gets the error, and all later writes are dropped.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._writes: asyncio.Queue[Write] = asyncio.Queue()
        self._on_failure = on_failure

    def put(self, write: Write) -> None:
        self._writes.put_nowait(write)

    async def flush(self) -> None:
        """Return when all writes so far are done."""
        await self._writes.join()

    async def run(self) -> None:
        while True:
            writes = [await self._writes.get()]
            while not self._writes.empty():
                writes.append(self._writes.get_nowait())
            try:
                await asyncio.gather(*(_begin(write) for write in writes))
            except BlockStoreError as error:
                self._on_failure(error)
                return
            finally:
                for _ in writes:
                    self._writes.task_done()


async def _begin(write: Write) -> None:
    """Delay the call of `write` until its task runs. Called earlier, a plain function that calls
    the store at once would overtake coroutines, whose bodies run later."""
    await write()
