"""What `BlockExtender` says of a pool with too few blocks."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockstore.errors import OutOfBlocks
from blockstore.records import Extension, Grown, Growth
from services.worker.pool_engine import PoolEngine
from services.worker.roles.block_extender import BlockExtender


class FullStore:
    """Refuses all blocks, and never has room. `during` is called while a call is on its way."""

    def __init__(self) -> None:
        self.during: Callable[[], object] = lambda: None
        self.room = asyncio.Event()
        self.refused = asyncio.Event()

    async def extend(self, _pool: str, _worker: str, growths: Sequence[Growth]) -> Extension:
        self.during()
        return Extension(tuple(Grown(each.holder_id, (), OutOfBlocks.code) for each in growths), ())

    async def wait_for_room(self, *_: object) -> None:
        self.refused.set()
        await self.room.wait()


@pytest.mark.parametrize("is_removed_during_the_call", [False, True])
async def test_it_is_short_while_a_holder_waits_for_blocks(
    is_removed_during_the_call: bool,
) -> None:
    store = FullStore()
    worker: Any = SimpleNamespace(store=store, pool_id="pool", worker_id="worker")
    extender = BlockExtender(cast(PoolEngine, worker), lambda _: None)
    extender.add("holder", 1, 2)
    extender.want("holder", 3)
    if is_removed_during_the_call:
        store.during = lambda: extender.remove("holder")
    async with asyncio.timeout(5):
        running = asyncio.create_task(extender.run())
        if is_removed_during_the_call:
            await asyncio.sleep(0.01)
        else:
            await store.refused.wait()
            assert extender.is_short
            extender.remove("holder")
        assert not extender.is_short
        running.cancel()
        await asyncio.wait([running])
