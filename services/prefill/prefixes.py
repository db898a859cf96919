"""Tracks the prefixes that this worker is computing, so that each of them is computed once."""

from collections.abc import Callable, Iterable, Sequence

from blockstore.records import PrefixHash


class PrefixesInProgress:
    """The prefix hashes of full blocks whose KV a request at this worker is computing.

    The request that computes a block is its leader. A follower, a request that shares such a block,
    holds no blocks: it waits until the last block that it shares is committed or the leader has
    ended for any reason, and then asks the store for cached blocks.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._leaders: dict[PrefixHash, str] = {}
        self._on_change = on_change

    def last_shared(self, hashes: Sequence[PrefixHash]) -> PrefixHash | None:
        """The last of `hashes` that is being computed; None: none of them is."""
        return next((h for h in reversed(hashes) if h in self._leaders), None)

    def __contains__(self, prefix_hash: PrefixHash | None) -> bool:
        return prefix_hash in self._leaders

    def begin(self, leader: str, hashes: Iterable[PrefixHash]) -> None:
        for prefix_hash in hashes:
            self._leaders.setdefault(prefix_hash, leader)

    def end(self, leader: str, hashes: Iterable[PrefixHash]) -> None:
        """Remove hashes of blocks that are committed, or whose leader has ended."""
        for prefix_hash in hashes:
            if self._leaders.get(prefix_hash) == leader:
                del self._leaders[prefix_hash]
        self._on_change()
