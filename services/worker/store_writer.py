"""The worker's writes to the block store, in order, behind the back of its step loop."""

import asyncio
from collections.abc import Awaitable, Callable

from blockstore.errors import BlockStoreError

Write = Callable[[], Awaitable[None]]


class StoreWriter:
    """Starts writes in the order of `put`; each must call the store before it awaits anything else,
    since the store keeps the order in which its operations are called.

    A refusal of the ledger is a broken law, a lost store the end of this worker: `on_failure` gets
    the error, and what was put after is dropped.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._writes: asyncio.Queue[Write] = asyncio.Queue()
        self._on_failure = on_failure

    def put(self, write: Write) -> None:
        self._writes.put_nowait(write)

    async def flush(self) -> None:
        """Return when everything put so far is written."""
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
    """Called when its turn comes: one that calls the store at once would overtake coroutines, which
    begin later."""
    await write()
