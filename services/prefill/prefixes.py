"""Prefixes that are being computed by this worker now, so that each is computed once."""

from collections.abc import Callable, Iterable, Sequence

from blockstore.records import PrefixHash


class PrefixesUnderWay:
    """Hashes of full blocks whose KV some request here is computing.

    A follower, a request that shares one of them, holds no blocks: it waits until the last one that
    it shares is committed or its leader has ended, however it ended, and then looks in the cache.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._leaders: dict[PrefixHash, str] = {}
        self._on_change = on_change

    def last_shared(self, hashes: Sequence[PrefixHash]) -> PrefixHash | None:
        """The longest prefix of `hashes` that somebody is computing."""
        return next((h for h in reversed(hashes) if h in self._leaders), None)

    def __contains__(self, prefix_hash: PrefixHash | None) -> bool:
        return prefix_hash in self._leaders

    def begin(self, leader: str, hashes: Iterable[PrefixHash]) -> None:
        for prefix_hash in hashes:
            self._leaders.setdefault(prefix_hash, leader)

    def end(self, leader: str, hashes: Iterable[PrefixHash]) -> None:
        """Some are committed, or the leader has ended."""
        for prefix_hash in hashes:
            if self._leaders.get(prefix_hash) == leader:
                del self._leaders[prefix_hash]
        self._on_change()
