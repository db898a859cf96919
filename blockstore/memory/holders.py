"""The holders of a pool's blocks, and the tombstones of released ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from blockstore.errors import StaleHolder
from blockstore.records import HolderInfo
from blockstore.store import TOMBSTONE_S, tenant_of


@dataclass(slots=True)
class Holder:
    """A holder and its blocks."""

    holder_id: str
    worker_id: str
    order: int
    num_cached_blocks: int
    acquired: list[int] = field(default_factory=list)
    """Every block that the holder ever got, in order."""
    held: set[int] = field(default_factory=set)
    epoch: int = 1
    runs: tuple[int, ...] = ()
    """The number of hashes that the allocation found in the prefix index, for each branch."""

    @property
    def tenant(self) -> str:
        return tenant_of(self.holder_id)

    @property
    def sort_key(self) -> tuple[int, str]:
        return self.order, self.holder_id

    def require(self, epoch: int) -> None:
        """Raise StaleHolder if the holder is at another epoch."""
        if self.epoch != epoch:
            raise StaleHolder(f"{self.holder_id} is at epoch {self.epoch}, not {epoch}")

    def acquire(self, block_ids: Sequence[int]) -> None:
        self.acquired.extend(block_ids)
        self.held.update(block_ids)

    def info(self) -> HolderInfo:
        return HolderInfo(
            self.holder_id, self.epoch, self.worker_id, self.order, num_blocks=len(self.held)
        )


class Holders(dict[str, Holder]):
    """The holders of a pool by id."""

    def require(self, holder_id: str) -> Holder:
        """Return a holder. Raises StaleHolder if there is none with this id."""
        if holder_id not in self:
            raise StaleHolder(f"{holder_id} holds nothing")
        return self[holder_id]

    def of(self, worker_id: str) -> list[Holder]:
        """Return a worker's holders, in order."""
        own = [holder for holder in self.values() if holder.worker_id == worker_id]
        return sorted(own, key=lambda holder: holder.sort_key)

    def order_of(self, holder_id: str) -> int:
        """Return the holder's order, or 0 if there is no such holder."""
        return self[holder_id].order if holder_id in self else 0


@dataclass(slots=True)
class Tombstones:
    """Remembers released holders or reaped workers (id -> last epoch) for `TOMBSTONE_S`."""

    clock: Callable[[], float]
    epochs: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, epoch: int = 0) -> None:
        self._forget_old()
        self._until.pop(key, None)  # keep `_until` in order of age
        self._until[key] = self.clock() + TOMBSTONE_S
        self.epochs[key] = epoch

    def epoch(self, key: str) -> int | None:
        self._forget_old()
        return self.epochs.get(key)

    def forget(self, key: str) -> None:
        del self._until[key], self.epochs[key]

    def _forget_old(self) -> None:
        now = self.clock()
        for key in list(takewhile(lambda key: self._until[key] <= now, self._until)):
            del self._until[key], self.epochs[key]
