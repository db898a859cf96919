"""The protocol keeps its laws in every state, and the explorer finds the fault of a wrong
ledger."""

from collections.abc import Sequence

import pytest

from blockstore.errors import OutOfBlocks
from blockstore.memory.holders import Holder
from blockstore.memory.ledger import Ledger
from blockstore.memory.waiters import Waiter
from blockstore.records import Allocation, Asserted, Claim, Content, PrefixHash, Wait
from tests.model_checking.actors import Faults
from tests.model_checking.explorer import (
    EXPLORED,
    EXPLORED_IN_FULL,
    RECOVERY_FAULTS,
    explore,
    explore_recovery,
)
from tests.model_checking.recovery_scenario import MakeRecovering
from tests.model_checking.scenario import MakeLedger

NONE = Faults()
CRASH = Faults(crashes=1)
LOSS = Faults(losses=1)
FENCE = Faults(fences=1)
RETAINED = Faults(retentions=2)


@pytest.mark.parametrize(
    "faults",
    [
        *EXPLORED,
        *(
            pytest.param(faults, marks=pytest.mark.full)
            for faults in EXPLORED_IN_FULL
            if faults not in EXPLORED
        ),
    ],
    ids=str,
)
def test_every_state_keeps_the_laws_and_can_end(faults: Faults) -> None:
    found = explore(faults)

    assert found.violation == "", "\n".join(found.trace)
    assert found.num_states > 30_000
    assert found.num_finished > 0


def test_without_faults_both_requests_can_be_served() -> None:
    """Some endings serve both requests, and no other faults are explored than those asked for."""
    found = explore(NONE)

    assert found.violation == ""
    assert found.num_served > 0
    assert found.num_states < 10_000


class ClaimsFromTheRunning(Ledger):
    """A claim ignores the epoch."""

    def claim(
        self, holder_id: str, epoch: int, worker_id: str, block_ids: Sequence[int] = ()
    ) -> Claim:
        self._require_live(worker_id)
        holder = self.holders.require(holder_id)
        holder.epoch, holder.worker_id = epoch + 1, worker_id
        return Claim.of(holder.epoch, holder.acquired, holder.held)


class ReapForgetsOne(Ledger):
    """The first of a dead worker's holders stays."""

    def reap(self, worker_id: str) -> int:
        forgotten = self.holders.of(worker_id)[:1]
        num_holders = super().reap(worker_id)
        for holder in forgotten:
            self.holders[holder.holder_id] = holder
            self.blocks.share(holder.acquired, holder.holder_id)
            holder.held.update(holder.acquired)
        return num_holders


class ReapForgetsWaiters(Ledger):
    """A dead worker's waiters stay."""

    def reap(self, worker_id: str) -> int:
        forgotten = self.waiters.copy()
        num_holders = super().reap(worker_id)
        self.waiters.update(forgotten)
        return num_holders


class ReleasesOnce(Ledger):
    """A repeated release is an error."""

    def release(self, holder_id: str, epoch: int, comes_back: bool = False) -> None:
        self._end(self.holders.require(holder_id))


class AllocatesTwice(Ledger):
    """A repeated allocation gets new blocks."""

    def allocate(
        self,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        self.holders.pop(holder_id, None)
        return super().allocate(holder_id, worker_id, order, hashes, num_blocks, branches)


class IgnoresFences(Ledger):
    """A fenced worker may do what any worker may."""

    def _require_live(self, worker_id: str) -> None:
        self._require_known(worker_id)


class FenceReleasesBlocks(Ledger):
    """A fence frees blocks that the worker may still write."""

    def fence(self, worker_id: str) -> None:
        super().fence(worker_id)
        for holder in self.holders.of(worker_id):
            self._end(holder)


class AcceptsCallsOfReapedWorkers(Ledger):
    """An operation that a dead worker sent before it was reaped is carried out afterwards."""

    def _require_live(self, worker_id: str) -> None:
        if self.workers.get(worker_id):
            super()._require_live(worker_id)


class DemandsNothing(Ledger):
    """A holder that is short of blocks waits without end."""

    def _demand_one(self) -> None:
        pass


class RetentionsPin(Ledger):
    """Requests wait for the end of a retention."""

    def _check_admission(
        self, holder_id: str, waiter: Waiter, hits: Sequence[int], num_blocks: int
    ) -> None:
        if self.blocks.kept:
            raise OutOfBlocks(num_blocks, 0)
        super()._check_admission(holder_id, waiter, hits, num_blocks)


class RetainsOnlyOnce(Ledger):
    """A block that was held and becomes free is no longer retained."""

    def _drop(self, holder: Holder, block_ids: set[int]) -> None:
        super()._drop(holder, block_ids)
        self.blocks.cached |= self.blocks.kept
        self.blocks.kept.clear()


@pytest.mark.parametrize(
    ("broken", "faults", "violation"),
    [
        (ClaimsFromTheRunning, CRASH, "runs r"),
        (ReapForgetsOne, CRASH, "which is not there"),
        (ReapForgetsWaiters, CRASH, "which is gone or fenced"),
        (ReleasesOnce, LOSS, "release was answered"),
        (AllocatesTwice, LOSS, "has 0 holders, but its ref count is 1"),
        (IgnoresFences, FENCE, "is fenced, but"),
        (FenceReleasesBlocks, FENCE, "which was released"),
        (AcceptsCallsOfReapedWorkers, CRASH, "which is not there"),
        (DemandsNothing, NONE, "not all requests can come to an end"),
        (RetentionsPin, RETAINED, "not all requests can come to an end"),
        (RetainsOnlyOnce, RETAINED, "is evicted first, but has a retained hash"),
    ],
)
def test_a_broken_ledger_is_found(broken: MakeLedger, faults: Faults, violation: str) -> None:
    found = explore(faults, broken)

    assert violation in found.violation
    assert found.trace


def test_a_recovery_keeps_the_laws_and_can_end() -> None:
    """Any worker may be stuck or die, at any time."""
    found = explore_recovery(RECOVERY_FAULTS)

    assert found.violation == "", "\n".join(found.trace)
    assert found.num_states > 1_000
    assert 0 < found.num_served < found.num_finished


class QuarantinesNothing(Ledger):
    """A stuck worker's blocks are not quarantined."""

    def fence(self, worker_id: str) -> None:
        self.rebuilding.missing.discard(worker_id)
        super().fence(worker_id)


class IgnoresMissingReports(Ledger):
    """A worker that has not reported holds nothing."""

    def restore(self, first: int, contents: Sequence[Content]) -> None:
        self.rebuilding.missing.clear()
        super().restore(first, contents)


class LastReportCounts(Ledger):
    """The last report is right."""

    def reassert(
        self, worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
    ) -> tuple[str, ...]:
        for asserted in holders:
            if known := self.holders.pop(asserted.holder_id, None):
                self._drop(known, set(known.held))
        return super().reassert(worker_id, holders, waits)


class FreesWhatIsHeld(Ledger):
    """Restored blocks are free, also held ones."""

    def restore(self, first: int, contents: Sequence[Content]) -> None:
        before = self.blocks.next_unused
        super().restore(first, contents)
        restored = range(before, self.blocks.next_unused)
        self.blocks.returned += [block for block in restored if block in self.blocks.refs]


@pytest.mark.parametrize(
    ("broken", "violation"),
    [
        (QuarantinesNothing, "which are to be had"),
        (IgnoresMissingReports, "block 1 is in 2 places"),
        (LastReportCounts, "runs t, which is"),
        (FreesWhatIsHeld, "in 2 places, not in 1"),
    ],
)
def test_a_broken_recovery_is_found(broken: MakeRecovering, violation: str) -> None:
    found = explore_recovery(RECOVERY_FAULTS, broken)

    assert violation in found.violation
    assert found.trace
