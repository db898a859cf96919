"""The blocks of one pool in memory: which are free, cached or held, and the prefix index.

Holders appear here only as a reference count of each block; `blockstore.memory.ledger` has them.
"""

from collections.abc import Callable, Sequence
from itertools import chain

from blockstore.memory.shares import Shares
from blockstore.records import Content, PrefixHash
from blockstore.store import NO_TENANT, QUARANTINE, tenant_of


class Blocks:
    """Tracks the state of each block, which is in exactly one of these places (law 1):

        [0 ............ next_unused)[next_unused ... num_blocks)
         returned | cached | kept | refs    never used

    (During a recovery, a block from `next_unused` on is in `refs`, or not yet in any place.)

    `returned` is a stack: the block that was given back last is handed out first. `cached` is in
    order of use, least recently used first; `kept` has the cached blocks with a hash in `retained`,
    which are evicted after them. `refs` maps a held block to the number of its holders.
    `index` and `hash_of` are inverse to each other and contain cached and held blocks only.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.num_blocks = num_blocks
        self.next_unused = 0
        self.returned: list[int] = []
        self.cached: dict[int, None] = {}
        self.kept: dict[int, None] = {}
        self.retained: dict[PrefixHash, tuple[int, str]] = {}
        """The retentions of each retained hash, and the owner who is charged for it."""
        self.refs: dict[int, int] = {}
        self.index: dict[PrefixHash, int] = {}
        self.hash_of: dict[int, PrefixHash] = {}
        self.ranks: dict[int, int] = {}  # restored block -> `Content.rank`, during a recovery
        self.shares = Shares(clock)
        self.payers: dict[int, str] = {}
        """The tenant of each block that was held before a recovery; only a quarantine asks."""
        self.num_freed = 0  # since the start; a rise tells that blocks were freed

    @property
    def num_free(self) -> int:
        return len(self.returned) + self.num_blocks - self.next_unused

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self.cached) + len(self.kept)

    def hits(self, hashes: Sequence[PrefixHash]) -> list[int]:
        """Return the blocks of the longest run of leading `hashes` that is in the index."""
        hits: list[int] = []
        for prefix_hash in hashes:
            if prefix_hash not in self.index:
                break
            hits.append(self.index[prefix_hash])
        return hits

    def find_hits(
        self, hashes: Sequence[PrefixHash], branches: Sequence[Sequence[PrefixHash]]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the hits of `hashes` and of each branch, every block once, and the number of hits
        of each branch. A branch has hits only if all of `hashes` is indexed."""
        hits = self.hits(hashes)
        is_whole = len(hits) == len(hashes)
        runs = [self.hits(branch) if is_whole else [] for branch in branches]
        return list(dict.fromkeys(chain(hits, *runs))), tuple(map(len, runs))

    def share(self, block_ids: Sequence[int], holder_id: str) -> None:
        """Give each block one more holder; cached blocks become held."""
        for block_id in block_ids:
            if block_id not in self.refs:
                self.shares.charges[tenant_of(holder_id)] += 1
                self._charge_owner(block_id, -1)
            self.cached.pop(block_id, None)
            self.kept.pop(block_id, None)
            self.refs[block_id] = self.refs.get(block_id, 0) + 1
        self._settle()

    def take(self, num_blocks: int, holder_id: str) -> list[int]:
        """Return new blocks with one holder each; `num_blocks` is at most `num_available`."""
        self.shares.charges[tenant_of(holder_id)] += max(0, num_blocks)
        taken = [self._take_one() for _ in range(num_blocks)]
        self._settle()
        return taken

    def drop(self, block_id: int, holder_id: str) -> None:
        """Remove one holder of a block; the last one makes it cached or free."""
        self.refs[block_id] -= 1
        if self.refs[block_id] > 0:
            return
        del self.refs[block_id]
        self.num_freed += 1
        of_quarantine = holder_id.startswith(QUARANTINE)
        payer = self.payers.get(block_id, NO_TENANT) if of_quarantine else tenant_of(holder_id)
        self.shares.charges[payer] -= 1
        if block_id >= self.next_unused:
            pass  # not accounted for yet
        elif block_id not in self.hash_of:
            self.returned.append(block_id)
        elif self.hash_of[block_id] in self.retained:
            self.kept[block_id] = None
            self._charge_owner(block_id, 1)
        else:
            self.cached[block_id] = None
        self._settle()

    def publish(self, block_id: int, prefix_hash: PrefixHash) -> bool:
        """Index a block under a hash unless another block has that hash. Returns whether this block
        is indexed now."""
        first = self.index.setdefault(prefix_hash, block_id)
        if first == block_id:
            self.hash_of[block_id] = prefix_hash
        return first == block_id

    def retract(self, block_id: int, prefix_hash: PrefixHash) -> None:
        if self.index.get(prefix_hash) != block_id:
            return
        self._charge_owner(block_id, -1)
        del self.index[prefix_hash], self.hash_of[block_id]
        if block_id in self.cached or block_id in self.kept:
            self.cached.pop(block_id, None)
            self.kept.pop(block_id, None)
            self.returned.append(block_id)
            self.num_freed += 1
            self._settle()

    def move(
        self, hashes: Sequence[PrefixHash], source: dict[int, None], target: dict[int, None]
    ) -> None:
        """Move the blocks of hashes, which are retained, from one order of eviction to the end of
        the other, tails first."""
        for prefix_hash in reversed(hashes):
            block_id = self.index.get(prefix_hash)
            if block_id in source:
                self._charge_owner(block_id, -1)
                del source[block_id]
                target[block_id] = None
                self._charge_owner(block_id, 1)
        self._settle()

    def restore(self, content: Content) -> None:
        """Account for the block `next_unused`, during a recovery."""
        block_id = self.next_unused
        self.next_unused += 1
        is_first = content.prefix_hash is not None and self.publish(block_id, content.prefix_hash)
        if block_id in self.refs:
            return
        if is_first:
            self.ranks[block_id] = content.rank
            restored = (self.cached.keys() & self.ranks.keys()) | {block_id}
            in_order = sorted(restored, key=lambda restored_id: self.ranks[restored_id])
            self.cached = dict.fromkeys([*in_order, *self.cached])
        else:
            self.returned.append(block_id)

    def _take_one(self) -> int:
        if self.returned:
            block_id = self.returned.pop()
        elif self.next_unused < self.num_blocks:
            block_id = self.next_unused
            self.next_unused += 1
        else:
            order = self.cached or self.kept
            block_id = next(iter(order))
            self._charge_owner(block_id, -1)
            del order[block_id], self.index[self.hash_of.pop(block_id)]
        self.refs[block_id] = 1
        return block_id

    def _charge_owner(self, block_id: int, number: int) -> None:
        """Charge a block to the owner of its retained hash, if it is among `kept`."""
        if block_id in self.kept:
            _, owner = self.retained[self.hash_of[block_id]]
            self.shares.charges[owner] += number

    def _settle(self) -> None:
        self.shares.settle(len(self.refs) + len(self.kept))
