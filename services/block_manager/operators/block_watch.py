"""Keeps a block map of every pool, while someone watches."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice

from blockstore.errors import UnknownPool
from blockstore.records import PoolStats
from quire.v1 import block_manager_pb2 as pb
from services.block_manager.operators.block_map import BlockMap, BlockState
from services.block_manager.rounds import Connection

MIN_INTERVAL_S = 0.4
"""The least time between two updates, however many gateways ask."""
IDLE_S = 30.0
"""The maps are dropped when nobody has asked for this long."""
MAX_HOLDERS = 256
"""The most holders in one answer: the first ones in order."""
MAX_DESCRIBED = 64


class BlockWatch:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._maps: dict[str, BlockMap] = {}
        self._updated_at = -MIN_INTERVAL_S
        self._lock = asyncio.Lock()
        self._drop: asyncio.TimerHandle | None = None

    async def maps(self, connection: Connection) -> list[BlockMap]:
        """Return the maps of all pools, updated unless that was done a moment ago. Raises the
        errors of the store."""
        if self._drop is not None:
            self._drop.cancel()
        self._drop = asyncio.get_running_loop().call_later(IDLE_S, self._maps.clear)
        async with self._lock:
            if self._clock() - self._updated_at >= MIN_INTERVAL_S:
                self._updated_at = self._clock()
                await self._update(connection)
        return [self._maps[pool_id] for pool_id in sorted(self._maps)]

    async def _update(self, connection: Connection) -> None:
        pool_ids = await connection.store.pool_ids()
        for pool_id in self._maps.keys() - set(pool_ids):
            del self._maps[pool_id]
        for pool_id in pool_ids:
            try:
                stats = await connection.store.stats(pool_id)
                known = self._maps.get(pool_id)
                if known is None or _identity(known.stats) != _identity(stats):
                    known = self._maps[pool_id] = BlockMap(stats, self._clock)
                await known.advance(connection.store)
            except UnknownPool:
                self._maps.pop(pool_id, None)

    async def describe(self, connection: Connection, pool_id: str, cell: int) -> list[pb.Block]:
        """Return the first blocks of a cell as the ledger has them now. Raises UnknownPool if
        nobody watches this pool, or it is gone."""
        block_map = self._maps.get(pool_id)
        if block_map is None or cell >= block_map.num_cells:
            raise UnknownPool(f"there is no block map of pool {pool_id} with a cell {cell}")
        block_ids = block_map.blocks_of(cell)[:MAX_DESCRIBED]
        return [
            pb.Block(
                block_id=info.block_id,
                state=block_map.state_of(info).name.lower(),
                num_holders=info.num_holders,
                prefix_hash=info.prefix_hash or b"",
                cached_at=info.cached_at,
                holder_ids=block_map.holders_of(info.block_id) if info.num_holders else (),
            )
            for info in await connection.store.block_infos(pool_id, block_ids)
        ]


def to_wire(block_map: BlockMap, pool: pb.Pool) -> pb.BlockMap:
    in_order = sorted(block_map.holders.values(), key=lambda info: (info.order, info.holder_id))
    return pb.BlockMap(
        pool=pool,
        blocks_per_cell=block_map.blocks_per_cell,
        cells=[
            pb.BlockCell(
                index=cell,
                num_unread=counts[BlockState.UNREAD],
                num_cached=counts[BlockState.CACHED],
                num_held=counts[BlockState.HELD],
                num_shared=counts[BlockState.SHARED],
                num_quarantined=counts[BlockState.QUARANTINED],
                holder_slot=slot,
                changed_s=changed_s,
            )
            for cell, counts, slot, changed_s in block_map.cells()
        ],
        holders=[
            pb.BlockHolder(
                slot=block_map.slots[info.holder_id],
                holder=pb.Holder(pool_id=pool.pool_id, **asdict(info)),
            )
            for info in islice(in_order, MAX_HOLDERS)
        ],
        age_s=block_map.age_s,
        fenced_worker_ids=block_map.stats.fenced_worker_ids,
    )


def _identity(stats: PoolStats) -> tuple[object, ...]:
    return stats.spec, stats.ledger_epoch
