"""The explorer's scenario of a recovery: two workers that may report, be stuck or die, a third one
that joins meanwhile, and the process that restores the ledger.

The ledger was lost when v ran `a`, and w had claimed `t` from v, which has not heard of it yet:

    block   0      1        2      3        4        5        6
    stamp   A      private  B      private  private  private  never used
    a of v  |------ 0, 1 ---|
    t       |               |--- 2, 3 -----|          as v reports it, at rest at epoch 2
            |               |--- 2, 3, 4 -----------| as w reports it, running at epoch 3

Each worker may report, be fenced as stuck, or die, at any time; a stuck one wakes and exits. The
ledger is restored in pages, any of which may be sent again. Once the recovery is over, each worker
asks for one more block and then releases all; u, which holds nothing, asks for two.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from blockstore.errors import OutOfBlocks, Recovering, StaleHolder
from blockstore.memory.ledger import Ledger
from blockstore.records import Asserted, Content, Extension, Growth, PoolSpec
from tests.model_checking.ledgers import Answer, Ledgers, Operation, Violation
from tests.model_checking.scenario import Label

SPEC = PoolSpec("pool", "model", "fingerprint", num_blocks=7, block_size=1, block_bytes=1)
A, B = b"a" * 16, b"b" * 16
PRIVATE = Content(private=True)
STAMPS = (Content(A, rank=1), PRIVATE, Content(B, rank=0), PRIVATE, PRIVATE, PRIVATE, Content())
PAGE = 4

RUNS_A = Asserted("a", 1, 1, 0, (0, 1))
ISSUED_T = Asserted("t", 2, 2, 0, (2, 3))
RUNS_T = Asserted("t", 3, 2, 0, (2, 3, 4))
REASSERTED = {"v": (RUNS_A, ISSUED_T), "w": (RUNS_T,), "u": ()}
MakeRecovering = Callable[[PoolSpec, Callable[[], float], int, tuple[str, ...]], Ledger]
"""Makes a ledger in recovery, its epoch, and the workers that have not reported."""

MAY_WRITE = {"v": {1}, "w": {3, 4}}
"""The blocks of the step in which a stuck worker stopped."""

Mode = Literal["missing", "heard", "grown", "stuck", "dead", "gone"]
RUNNING = ("heard", "grown")


class Around(NamedTuple):
    """The modes of v, w and u; u has reported from the beginning."""

    ledger: int
    v: Mode = "missing"
    w: Mode = "missing"
    u: Mode = "heard"
    faults_left: int = 2

    def mode(self, worker: str) -> Mode:
        mode: Mode = getattr(self, worker)
        return mode


class Step(NamedTuple):
    """As `tests.model_checking.scenario.Step`."""

    label: Label
    state: Around
    fault: bool = False


class RecoveryScenario:
    """See `tests.model_checking.scenario.Scenario`."""

    def __init__(self, make_ledger: MakeRecovering, num_faults: int) -> None:
        ledger = make_ledger(SPEC, lambda: 0.0, 2, ("v", "w"))
        ledger.register_worker(SPEC, "u")
        self.ledgers = Ledgers(ledger)
        self._num_faults = num_faults

    def start(self) -> Around:
        return Around(self.ledgers.first, faults_left=self._num_faults)

    def finished(self, state: Around) -> bool:
        """All workers are done, and nothing is left."""
        ledger = self.ledgers[state.ledger]
        gone = all(state.mode(worker) == "gone" for worker in REASSERTED)
        return gone and ledger.rebuilding.is_over and not ledger.holders

    def served(self, state: Around) -> bool:
        """No worker had to die."""
        return state.faults_left == self._num_faults

    def steps(self, state: Around) -> Iterator[Step]:
        for worker in REASSERTED:
            yield from self._worker(state, worker)
        for first in range(0, len(STAMPS), PAGE):
            page = STAMPS[first : first + PAGE]
            yield self._do(state, "restore", first, page)
        yield self._do(state, "reopen")

    def check(self, state: Around) -> None:
        """Law 5: the blocks that a stuck worker may write belong to no running worker, and cannot
        be allocated. Law 4: a running worker has the blocks that it reported. (Law 1 is audited
        with each ledger.)"""
        ledger = self.ledgers[state.ledger]
        if not ledger.rebuilding.is_over:
            return
        running = [h for h in ledger.holders.values() if h.epoch % 2]
        for worker, blocks in MAY_WRITE.items():
            if state.mode(worker) != "stuck":
                continue
            for holder in running:
                if holder.worker_id != worker and not blocks.isdisjoint(holder.held):
                    raise Violation(f"{holder.holder_id} has {holder.held}, {worker} writes there")
            if not blocks <= ledger.blocks.refs.keys():
                raise Violation(f"{worker} may write {blocks}, which are to be had")
        for worker, asserted in (("v", RUNS_A), ("w", RUNS_T)):
            if state.mode(worker) in RUNNING:
                self._check_runs(ledger, worker, asserted)

    @staticmethod
    def _check_runs(ledger: Ledger, worker: str, asserted: Asserted) -> None:
        holder = ledger.holders.get(asserted.holder_id)
        if holder is None or (holder.worker_id, holder.epoch) != (worker, asserted.epoch):
            raise Violation(f"{worker} runs {asserted.holder_id}, which is {holder}")
        if not holder.held.issuperset(asserted.block_ids):
            raise Violation(f"{worker} uses {asserted.block_ids}, but it has {holder.held}")

    def _worker(self, state: Around, worker: str) -> Iterator[Step]:
        match state.mode(worker):
            case "missing":
                yield self._do(
                    state, "reassert", worker, REASSERTED[worker], (), to=(worker, "heard")
                )
                if state.faults_left:
                    stuck = self._do(state, "fence", worker, to=(worker, "stuck"))
                    yield self._fault(stuck)
                    yield self._fault(self._become(state, worker, "dead"))
            case "heard":
                yield self._grow(state, worker)
                if state.faults_left and worker != "u":
                    yield self._fault(self._become(state, worker, "dead"))
            case "grown":
                yield from self._let_go(state, worker)
            case "stuck":
                yield self._become(state, worker, "dead")  # it wakes, and exits
            case "dead":
                yield self._do(state, "reap", worker, to=(worker, "gone"))

    def _grow(self, state: Around, worker: str) -> Step:
        """One block more; u gets its first two. A worker that is refused asks again."""
        if worker == "u":
            return self._do(state, "allocate", "n", "u", 3, (A,), 2, to=("u", "grown"))
        asserted = REASSERTED[worker][0]
        num_blocks = len(asserted.block_ids)
        growth = Growth(asserted.holder_id, asserted.epoch, num_blocks, num_blocks + 1)
        return self._do(state, "extend", worker, (growth,), to=(worker, "grown"))

    def _let_go(self, state: Around, worker: str) -> Iterator[Step]:
        """A worker releases all that it knows; the issuer of a ticket takes it back, unless it was
        claimed."""
        holders = (
            [("n", 1)] if worker == "u" else [(h.holder_id, h.epoch) for h in REASSERTED[worker]]
        )
        number, label = state.ledger, list[object]([worker])
        for holder_id, epoch in holders:
            number, answer = self.ledgers.after(number, ("release", (holder_id, epoch)))
            label += ["release", holder_id, answer.error]
            if answer.error and (answer.error, holder_id) != (StaleHolder.code, "t"):
                raise Violation(f"{worker} cannot release {holder_id}: {answer.error}")
        yield Step(tuple(label), _with(state, number, worker, "gone"))

    # What a step does

    def _do(
        self, state: Around, name: str, *arguments: object, to: tuple[str, Mode] | None = None
    ) -> Step:
        """One operation, after which a worker enters another mode, unless it was refused."""
        operation: Operation = (name, arguments)
        number, answer = self.ledgers.after(state.ledger, operation)
        label: Label = (*operation, answer.error)
        if _refused(answer):
            if answer.error not in ("", Recovering.code, OutOfBlocks.code):
                raise Violation(f"{name} {arguments} fails: {answer.error}")
            return Step(label, state._replace(ledger=number))
        return Step(label, _with(state, number, *to) if to else state._replace(ledger=number))

    @staticmethod
    def _become(state: Around, worker: str, mode: Mode) -> Step:
        return Step(f"{worker} is {mode}", _with(state, state.ledger, worker, mode))

    @staticmethod
    def _fault(step: Step) -> Step:
        left = step.state.faults_left - 1
        return Step(step.label, step.state._replace(faults_left=left), fault=True)


def _with(state: Around, ledger: int, worker: str, mode: Mode) -> Around:
    modes: dict[str, Any] = {worker: mode}
    return state._replace(ledger=ledger, **modes)


def _refused(answer: Answer) -> bool:
    if isinstance(answer.value, Extension):
        return any(grown.error for grown in answer.value.grown)
    return bool(answer.error)
