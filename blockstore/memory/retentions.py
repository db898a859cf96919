"""The retentions of a pool: prefixes whose blocks are evicted last."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockstore.memory.blocks import Blocks
from blockstore.records import PrefixHash, Retained, Retention

Key = tuple[str, str]
"""The owner and the name of a retention."""


@dataclass(frozen=True, slots=True)
class Entry:
    ends_at: float
    """A time of the ledger's clock."""
    hashes: tuple[PrefixHash, ...]


class Retentions(dict[Key, Entry]):
    """The retentions by key. `Blocks.retained` has the number of retentions of each hash and the
    owner who is charged for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.charged = Counter[str]()
        """The number of hashes for which each owner is charged."""

    def retain(
        self, blocks: Blocks, key: Key, ttl_ms: int, limits: tuple[int, int], asked: Sequence[bytes]
    ) -> Retained:
        self.end_expired(blocks)
        owner, hashes = key[0], tuple(asked)
        if key not in self or self[key].hashes != hashes:
            self.end(blocks, key)
            room = min(limits[0] - self.charged[owner], limits[1] - len(blocks.retained))
            hashes = self._add(blocks, owner, hashes, room)
        if hashes:
            self[key] = Entry(self.clock() + ttl_ms / 1000, hashes)
        return Retained(len(hashes), self.charged[owner], len(blocks.retained))

    def end(self, blocks: Blocks, key: Key) -> bool:
        """End a retention; returns whether there was one."""
        entry = self.pop(key, None)
        hashes = entry.hashes if entry else ()
        gone = [each for each in hashes if blocks.retained[each][0] == 1]
        blocks.move(gone, blocks.kept, blocks.cached)
        for prefix_hash in hashes:
            count, owner = blocks.retained[prefix_hash]
            blocks.retained[prefix_hash] = count - 1, owner
        for prefix_hash in gone:
            self.charged[blocks.retained.pop(prefix_hash)[1]] -= 1
        return entry is not None

    def end_expired(self, blocks: Blocks) -> None:
        for key in sorted(self, key=lambda key: (self[key].ends_at, "/".join(key))):
            if self[key].ends_at <= self.clock():
                self.end(blocks, key)

    def records(self, blocks: Blocks, with_hashes: bool) -> tuple[Retention, ...]:
        return tuple(
            Retention(
                *key,
                num_blocks=len(entry.hashes),
                num_cached=sum(each in blocks.index for each in entry.hashes),
                left_ms=max(0, round((entry.ends_at - self.clock()) * 1000)),
                hashes=entry.hashes if with_hashes else (),
            )
            for key, entry in sorted(self.items())
        )

    def _add(
        self, blocks: Blocks, owner: str, hashes: Sequence[bytes], room: int
    ) -> tuple[PrefixHash, ...]:
        """Retain the leading hashes, as far as there is `room` for those that are new."""
        added, new = list[PrefixHash](), list[PrefixHash]()
        for prefix_hash in hashes:
            count, payer = blocks.retained.get(prefix_hash, (0, owner))
            if not count:
                if len(new) >= room:
                    break
                new.append(prefix_hash)
            blocks.retained[prefix_hash] = count + 1, payer
            added.append(prefix_hash)
        self.charged[owner] += len(new)
        blocks.move(new, blocks.cached, blocks.kept)
        return tuple(added)
