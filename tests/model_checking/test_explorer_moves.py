"""The protocol keeps its laws wherever a request moves, and the explorer finds the fault of a wrong
ledger."""

from collections.abc import Sequence

import pytest

from blockstore.errors import OutOfBlocks, StaleHolder
from blockstore.memory.ledger import Ledger
from blockstore.records import Claim, Grown, Growth
from tests.model_checking.actors import Faults
from tests.model_checking.explorer import EXPLORED_MOVES, explore_moves
from tests.model_checking.scenario import MakeLedger

MOVE = Faults(moves=1)
MOVES = Faults(moves=2)
CRASH = Faults(moves=1, crashes=1)
FENCE = Faults(moves=1, fences=1)


@pytest.mark.parametrize("faults", EXPLORED_MOVES, ids=str)
def test_every_move_keeps_the_laws_and_can_end(faults: Faults) -> None:
    found = explore_moves(faults)

    assert found.violation == "", "\n".join(found.trace)
    assert found.num_states > 10_000
    assert 0 < found.num_served < found.num_finished


class DetachRaisesNothing(Ledger):
    """A detach succeeds, but the epoch stays."""

    def detach(self, holder_id: str, epoch: int) -> int:
        if epoch == 1:
            return super().detach(holder_id, epoch)
        self._require_unfenced(holder_id).require(epoch)
        return epoch + 1


class FencedComeToRest(Ledger):
    """Requests of a fenced worker, which may still write, can be claimed."""

    def detach(self, holder_id: str, epoch: int) -> int:
        holder = self.holders.require(holder_id)
        holder.epoch = epoch + 1
        return holder.epoch


class ClaimsTwice(Ledger):
    """Every worker with the ticket can claim it, also after another one."""

    def claim(
        self, holder_id: str, epoch: int, worker_id: str, block_ids: Sequence[int] = ()
    ) -> Claim:
        self._require_live(worker_id)
        holder = self.holders.require(holder_id)
        if epoch % 2 or holder.epoch not in (epoch, epoch + 1):
            raise StaleHolder(holder_id)
        holder.epoch, holder.worker_id = epoch + 1, worker_id
        return Claim.of(holder.epoch, holder.acquired, holder.held)


class ClaimKeepsTheOwner(Ledger):
    """The blocks still belong to the issuer of the ticket after a claim."""

    def claim(
        self, holder_id: str, epoch: int, worker_id: str, block_ids: Sequence[int] = ()
    ) -> Claim:
        owner = self.holders.require(holder_id).worker_id
        claimed = super().claim(holder_id, epoch, worker_id, block_ids)
        self.holders[holder_id].worker_id = owner
        return claimed


class ReleasesWhatWasClaimed(Ledger):
    """The issuer of a ticket can release it also after a claim."""

    def release(self, holder_id: str, epoch: int, comes_back: bool = False) -> None:
        holder = self.holders.require(holder_id)
        if holder.epoch == epoch + 1 and epoch % 2 == 0:
            epoch = holder.epoch
        super().release(holder_id, epoch, comes_back)


class ForgetsWhatIsInFlight(Ledger):
    """The answer to a growth has only the new blocks, without those of an earlier growth."""

    def _grow(self, worker_id: str, growth: Growth) -> Grown:
        holder = self.holders.get(growth.holder_id)
        if holder is None or (holder.worker_id, holder.epoch) != (worker_id, growth.epoch):
            return Grown(growth.holder_id, (), StaleHolder.code)
        needed = growth.total - growth.have
        if needed > self.blocks.num_available:
            return Grown(growth.holder_id, (), OutOfBlocks.code)
        new = self.blocks.take(needed, holder.holder_id)
        holder.acquire(new)
        return Grown(growth.holder_id, tuple(new))


@pytest.mark.parametrize(
    ("broken", "faults", "violation"),
    [
        (DetachRaisesNothing, MOVE, "no run has r0.1"),
        (FencedComeToRest, FENCE, "is fenced, but detach"),
        (ClaimsTwice, MOVES, "but it is"),
        (ClaimKeepsTheOwner, MOVE, "but it is v1"),
        (ReleasesWhatWasClaimed, MOVE, "which was released"),
        (ForgetsWhatIsInFlight, MOVE, "of r0.1, which has"),
    ],
)
def test_a_broken_move_is_found(broken: MakeLedger, faults: Faults, violation: str) -> None:
    found = explore_moves(faults, broken)

    assert violation in found.violation
    assert found.trace
