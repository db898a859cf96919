"""A store client's record of the holders and waits of its worker. In a recovery, the client reports
them to the server that has lost the ledger.

The record follows the server's replies, in their order. A call without a reply is not in the record
yet; the client sends it again after the recovery, to the new ledger. Each update also marks new
blocks in their stamps as owned by their holder. So a recovery that gets a holder's report never
mistakes the old content of the holder's blocks for their current one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockstore.errors import MustWait, OutOfBlocks, StaleHolder
from blockstore.records import Asserted, Growth, PoolSpec, Wait
from blockstore.store import MarkOwned, Recovery


@dataclass(slots=True)
class _Holder:
    epoch: int
    order: int
    num_cached: int
    acquired: list[int]
    given_back: set[int] = field(default_factory=set)


class HeldBlocksMirror:
    """Records the holders and waits of one worker on one pool."""

    def __init__(
        self,
        spec: PoolSpec,
        worker_id: str,
        recovery: Recovery | None = None,
        mark_owned: MarkOwned | None = None,
    ) -> None:
        self.spec = spec
        self.worker_id = worker_id
        self.recovery = recovery
        self._mark_owned = mark_owned or _mark_nothing
        self._holders: dict[str, _Holder] = {}
        self._waits: dict[str, Wait] = {}

    def report(self) -> tuple[list[Asserted], list[Wait]]:
        """Return all holders and waits, as arguments for `BlockStore.reassert`."""
        holders = [
            Asserted(
                holder_id,
                holder.epoch,
                holder.order,
                holder.num_cached,
                tuple(holder.acquired),
                tuple(sorted(holder.given_back)),
            )
            for holder_id, holder in self._holders.items()
        ]
        return holders, list(self._waits.values())

    # One method for each operation; `reply` is the server's reply, or its error

    def record_allocate(self, worker_id: str, holder_id: str, order: int, reply: Any) -> None:
        if worker_id != self.worker_id:
            return
        if isinstance(reply, MustWait | OutOfBlocks):
            self._waits[holder_id] = Wait(holder_id, order)
        elif not isinstance(reply, Exception):
            self._waits.pop(holder_id, None)
            if holder_id in self._holders:
                return
            epoch, num_cached, _runs, *blocks = reply
            blocks = list(map(int, blocks))
            self._mark_owned(holder_id, blocks[num_cached:])
            self._holders[holder_id] = _Holder(epoch, order, num_cached, blocks)

    def record_withdraw(self, holder_id: str, reply: Any) -> None:
        if not isinstance(reply, Exception):
            self._waits.pop(holder_id, None)

    def record_extend(self, growths: Sequence[Growth], reply: Any) -> None:
        if isinstance(reply, Exception):
            return
        for growth, (_, *answer) in zip(growths, reply[1:], strict=True):
            if holder := self._holders.get(growth.holder_id):
                new = [int(block) for block in answer[len(holder.acquired) - growth.have :]]
                self._mark_owned(growth.holder_id, new)
                holder.acquired += new
                holder.given_back.difference_update(new)

    def record_detach(self, holder_id: str, epoch: int, reply: Any) -> None:
        holder = self._holders.get(holder_id)
        if isinstance(reply, Exception):
            self._forget_stale(holder_id, epoch, reply)
        elif holder:
            holder.epoch = reply

    def record_claim(self, worker_id: str, holder_id: str, reply: Any) -> None:
        if isinstance(reply, Exception):
            return
        self._holders.pop(holder_id, None)
        if worker_id == self.worker_id:
            epoch, order, num_cached, num_acquired, *blocks = map(int, reply)
            acquired, given_back = blocks[:num_acquired], set(blocks[num_acquired:])
            self._holders[holder_id] = _Holder(epoch, order, num_cached, acquired, given_back)

    def record_give_back(self, holder_id: str, block_ids: Iterable[int], reply: Any) -> None:
        holder = self._holders.get(holder_id)
        if holder and not isinstance(reply, Exception):
            holder.given_back.update(set(holder.acquired).intersection(block_ids))

    def record_release(self, holder_id: str, epoch: int, comes_back: bool, reply: Any) -> None:
        if isinstance(reply, Exception):
            self._forget_stale(holder_id, epoch, reply)
        elif (holder := self._holders.pop(holder_id, None)) and comes_back:
            self._waits[holder_id] = Wait(holder_id, holder.order, epoch)

    def _forget_stale(self, holder_id: str, epoch: int, error: Exception) -> None:
        """Forget a holder after StaleHolder: another worker claimed it, or it was released."""
        holder = self._holders.get(holder_id)
        if isinstance(error, StaleHolder) and holder and holder.epoch == epoch:
            del self._holders[holder_id]


def _mark_nothing(holder_id: str, block_ids: Sequence[int]) -> None:
    """The `mark_owned` of a worker that writes into no blocks."""
