"""The block map: the state of every block of a pool, followed for observers at a bounded cost.

A pool of any size has at most `MAX_CELLS` cells; a cell stands for consecutive blocks. Nothing is
read unless someone watches. One `advance` reads, however large the pool is:

    the pool's counters       O(1); blocks that were never used are free, and are not read
    MAX_HOLDER_PAGES pages    of holders, all of them in turn; one that came, went or changed its
                              number of blocks makes its blocks *dirty*
    up to MAX_LISTS lists     of the blocks of such holders
    up to MAX_LOOKS blocks    first the dirty ones, then those that were used before someone
                              watched; when all are known, MAX_AGAIN in turn, which finds what no
                              holder shows (a wrong entry that left the prefix index)
"""

import time
from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum
from itertools import islice

from blockstore.records import BlockInfo, HolderInfo, PoolStats
from blockstore.store import QUARANTINE, BlockStore

MAX_CELLS = 2048
HOLDER_PAGE = 64
MAX_HOLDER_PAGES = 4
MAX_LISTS = 64
MAX_LOOKS = 4096
MAX_AGAIN = 256


class BlockState(IntEnum):
    FREE = 0
    UNREAD = 1
    CACHED = 2
    HELD = 3
    SHARED = 4
    QUARANTINED = 5


class BlockMap:
    """Follows the blocks of one pool; `stats` has the counters at the last `advance`."""

    def __init__(self, stats: PoolStats, clock: Callable[[], float] = time.monotonic) -> None:
        num_blocks = stats.spec.num_blocks
        self.stats = stats
        self.blocks_per_cell = -(-num_blocks // MAX_CELLS)
        self.num_cells = -(-num_blocks // self.blocks_per_cell)
        self.holders: dict[str, HolderInfo] = {}
        self.slots: dict[str, int] = {}
        self._clock = clock
        self._started_at = clock()
        self._now_s = 0
        self._held: dict[str, frozenset[int]] = {}
        self._quarantined: list[frozenset[int]] = []
        self._free_slots: list[int] = []
        self._states = bytearray(num_blocks)
        self._counts = array("I", bytes(4 * len(BlockState) * self.num_cells))
        self._cell_slots = array("I", bytes(4 * self.num_cells))
        self._cell_changed_s = array("I", bytes(4 * self.num_cells))
        self._dirty: dict[int, None] = {}
        self._to_list: dict[str, None] = {}
        self._next_holder = 0
        self._seen: set[str] = set()
        self._next_block = 0
        self._num_unread = min(stats.num_accounted, num_blocks)
        self._count_unread()

    def _count_unread(self) -> None:
        """At the start the first blocks are unread, and the others free."""
        num_unread = self._num_unread
        self._states[:num_unread] = bytes([BlockState.UNREAD]) * num_unread
        for cell in range(self.num_cells):
            blocks, at = self.blocks_of(cell), cell * len(BlockState)
            num_in_cell = min(max(0, num_unread - blocks.start), len(blocks))
            self._counts[at + BlockState.FREE] = len(blocks) - num_in_cell
            self._counts[at + BlockState.UNREAD] = num_in_cell

    @property
    def age_s(self) -> int:
        return int(self._clock() - self._started_at)

    def blocks_of(self, cell: int) -> range:
        first = cell * self.blocks_per_cell
        return range(first, min(first + self.blocks_per_cell, len(self._states)))

    async def advance(self, store: BlockStore) -> None:
        """Read the next part of the ledger. Raises the errors of the store."""
        pool_id = self.stats.spec.pool_id
        stats = await store.stats(pool_id)
        if stats.fenced_worker_ids != self.stats.fenced_worker_ids:
            changed = set(stats.fenced_worker_ids) ^ set(self.stats.fenced_worker_ids)
            for holder_id, info in self.holders.items():
                if info.worker_id in changed:
                    self._dirty |= dict.fromkeys(self._held.get(holder_id, ()))
        self.stats = stats
        self._now_s = self.age_s
        for _ in range(0 if stats.recovering else MAX_HOLDER_PAGES):
            page = await store.holder_page(pool_id, self._next_holder, HOLDER_PAGE)
            self._note_holders(page)
            if len(page) < HOLDER_PAGE:
                break
        for holder_id in list(islice(self._to_list, MAX_LISTS)):
            del self._to_list[holder_id]
            self._note_blocks(holder_id, await store.held_blocks(pool_id, holder_id))
        self._quarantined = [
            held for holder_id, held in self._held.items() if self._is_quarantined(holder_id)
        ]
        for block in await store.block_infos(pool_id, self._blocks_to_read()):
            self._set(block.block_id, self.state_of(block))

    def state_of(self, info: BlockInfo) -> BlockState:
        if not info.num_holders:
            return BlockState.FREE if info.cached_at is None else BlockState.CACHED
        if any(info.block_id in held for held in self._quarantined):
            return BlockState.QUARANTINED
        return BlockState.HELD if info.num_holders == 1 else BlockState.SHARED

    def holders_of(self, block_id: int) -> list[str]:
        """The holders of a block, as far as their lists of blocks have been read."""
        return [holder_id for holder_id, held in self._held.items() if block_id in held]

    def cells(self) -> Iterator[tuple[int, list[int], int, int]]:
        """Yield each cell that is not entirely free, or has changed: its index, its number of
        blocks in each state, the slot of one holder, and the second of its last change."""
        for cell, changed_s in enumerate(self._cell_changed_s):
            at = cell * len(BlockState)
            counts = list(self._counts[at : at + len(BlockState)])
            if changed_s or any(counts[1:]):
                yield cell, counts, self._cell_slots[cell], changed_s

    def _is_quarantined(self, holder_id: str) -> bool:
        if holder_id.startswith(QUARANTINE):
            return True
        return self.holders[holder_id].worker_id in self.stats.fenced_worker_ids

    def _note_holders(self, page: tuple[HolderInfo, ...]) -> None:
        for info in page:
            known = self.holders.get(info.holder_id)
            self._seen.add(info.holder_id)
            self.holders[info.holder_id] = info
            if known is None:
                slot = self._free_slots.pop() if self._free_slots else len(self.slots) + 1
                self.slots[info.holder_id] = slot
            if known is None or known.num_blocks != info.num_blocks:
                self._to_list[info.holder_id] = None
            elif known.worker_id != info.worker_id and self.stats.fenced_worker_ids:
                self._dirty |= dict.fromkeys(self._held.get(info.holder_id, ()))
        self._next_holder += len(page)
        if len(page) < HOLDER_PAGE:
            for holder_id in self.holders.keys() - self._seen:
                self._drop_holder(holder_id)
            self._seen, self._next_holder = set(), 0

    def _drop_holder(self, holder_id: str) -> None:
        self._dirty |= dict.fromkeys(self._held.pop(holder_id, ()))
        del self.holders[holder_id]
        self._free_slots.append(self.slots.pop(holder_id))
        self._to_list.pop(holder_id, None)

    def _note_blocks(self, holder_id: str, held: frozenset[int]) -> None:
        before = self._held.get(holder_id, frozenset())
        self._held[holder_id] = held
        self._dirty |= dict.fromkeys(held ^ before)
        for block_id in held - before:
            cell = block_id // self.blocks_per_cell
            self._cell_slots[cell] = self.slots[holder_id]
            self._cell_changed_s[cell] = self._now_s

    def _blocks_to_read(self) -> list[int]:
        num_used = min(self.stats.num_accounted, len(self._states))
        blocks = dict.fromkeys(islice(self._dirty, MAX_LOOKS))
        for block_id in blocks:
            del self._dirty[block_id]
        room = MAX_LOOKS - len(blocks)
        for _ in range(min(room if self._num_unread else MAX_AGAIN, room, num_used)):
            blocks[self._next_block % num_used] = None
            self._next_block = (self._next_block + 1) % num_used
        return list(blocks)

    def _set(self, block_id: int, state: BlockState) -> None:
        old = self._states[block_id]
        if old == state:
            return
        self._states[block_id] = state
        cell = block_id // self.blocks_per_cell
        self._counts[cell * len(BlockState) + old] -= 1
        self._counts[cell * len(BlockState) + state] += 1
        if old == BlockState.UNREAD:
            self._num_unread -= 1
        else:
            self._cell_changed_s[cell] = self._now_s
