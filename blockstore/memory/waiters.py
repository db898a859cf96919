"""The waiters of a pool, returning ones included."""

from dataclasses import dataclass

from blockstore.memory.holders import Tombstones


@dataclass(frozen=True, slots=True)
class Waiter:
    order: int
    worker_id: str


class Waiters(dict[str, Waiter]):
    """The waiters by holder id. A request that was refused blocks has one, and so has a preempted
    request, which comes back as another holder of the same order."""

    def of(self, worker_id: str) -> list[str]:
        return [holder_id for holder_id, waiter in self.items() if waiter.worker_id == worker_id]

    def is_first(self, waiter: Waiter) -> bool:
        return all(waiter.order <= other.order for other in self.values())

    def remove_returning(self, order: int, released: Tombstones) -> None:
        """Remove the returning waiter of this order: its request asks for blocks again."""
        for holder_id, waiter in tuple(self.items()):
            if waiter.order == order and released.epoch(holder_id) is not None:
                del self[holder_id]

    def remove_worker(self, worker_id: str) -> None:
        for holder_id in self.of(worker_id):
            del self[holder_id]
