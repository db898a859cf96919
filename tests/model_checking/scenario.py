"""The explorer's main scenario: a gateway, two workers and a block manager with one ledger.

Two requests with a common prefix of one block run on a pool of four blocks, which is one too few if
neither finds the other's prefix in the cache. A request makes one ledger operation in each phase of
the worker's `Run`:

    queued -> allocate -> commit -> detach -> rest -> claim -> extend -> finish -> done
              prefill worker                 |       decode worker
                                             '- the ticket is with the gateway, the blocks with
                                                its issuer, which releases it after a time limit

A request whose blocks are demanded is preempted (yield, yielded) in any phase, and keeps its place
in line until the time limit of its worker (place). A worker that learns that it is fenced releases
what it holds; if it cannot know whether it has a holder, it exits. Every operation may lose its
reply, and is then sent again before any other one of that worker. A worker may be fenced or die at
any time, and an operation of a dead worker may arrive late. The gateway sends the requests of lost
workers to others. Each of these faults happens a limited number of times.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from blockstore.errors import MustWait, OutOfBlocks, StaleHolder, WorkerFenced
from blockstore.memory.ledger import Ledger
from blockstore.records import Allocation, Extension, PoolSpec
from tests.model_checking.actors import (
    NUM_FINAL_BLOCKS,
    PREFIX,
    Faults,
    Phase,
    Request,
    Run,
    State,
    Unanswered,
)
from tests.model_checking.ledgers import Answer, Ledgers, Operation, Violation

MakeLedger = Callable[[PoolSpec, Callable[[], float]], Ledger]

SPEC = PoolSpec("pool", "model", "fingerprint", num_blocks=4, block_size=1, block_bytes=1)
MAX_ATTEMPTS = 2

Label = str | tuple[object, ...]
"""The description of a step; `spelled` makes it readable."""


class Step(NamedTuple):
    """`fault`: a request must be able to end without it."""

    label: Label
    state: State
    fault: bool = False


class Scenario:
    """The steps that a state allows, and the laws that hold in it."""

    workers: tuple[str, ...] = ("v1", "w1")

    def __init__(self, make_ledger: MakeLedger, faults: Faults) -> None:
        ledger = make_ledger(SPEC, lambda: 0.0)
        for worker in self.workers:
            ledger.register_worker(SPEC, worker)
        self.ledgers = Ledgers(ledger)
        self.faults = faults

    def start(self) -> State:
        requests = tuple(Request(1, "queued", f"r{number}.1") for number in range(2))
        return State(self.ledgers.first, requests, faults_left=self.faults)

    def finished(self, state: State) -> bool:
        """Every request has ended, and left nothing behind."""
        ledger = self.ledgers[state.ledger]
        ended = all(request.ended for request in state.requests)
        return ended and not (state.runs or state.dead or ledger.holders or ledger.waiters)

    def served(self, state: State) -> bool:
        """No request has failed."""
        return all(request.status == "done" for request in state.requests)

    def steps(self, state: State) -> Iterator[Step]:
        """Every step, with the state that represents all states that cannot be distinguished from
        its target."""
        for actor in self._actors:
            for label, after, fault in actor(state):
                ledger, renaming = self.ledgers.settle(after.ledger, after.names())
                yield Step(label, after.renamed(ledger, renaming), fault)

    @property
    def _actors(self) -> tuple[Callable[[State], Iterator[Step]], ...]:
        return self._gateway, self._workers, self._block_manager, self._faults

    # The gateway

    def _gateway(self, state: State) -> Iterator[Step]:
        for number, request in enumerate(state.requests):
            if request.status in ("queued", "at_rest"):
                for worker in self._candidates(state, issuer=request.worker):
                    yield self._send_out(state, number, request, worker)
            elif request.status == "placed" and not self._serving(state, request.worker):
                label = f"the gateway takes r{number} back from {request.worker}"
                yield Step(label, self._take_back(state, number))

    def _candidates(self, state: State, issuer: str) -> list[str]:
        """The workers that may continue a request; the ticket stays with its issuer only if no
        other worker is there."""
        workers = sorted(self.ledgers[state.ledger].workers)
        serving = [worker for worker in workers if self._serving(state, worker)]
        return [worker for worker in serving if worker != issuer] or serving

    def _serving(self, state: State, worker: str) -> bool:
        return self.ledgers[state.ledger].workers.get(worker) is False and worker not in state.dead

    def _send_out(self, state: State, number: int, request: Request, worker: str) -> Step:
        if request.status == "queued":
            run = Run(worker, request.holder, number, "allocate")
        else:
            at_rest = request.epoch, request.ticket
            run = Run(worker, request.holder, number, "claim", *at_rest)
        placed = request._replace(status="placed", worker=worker)
        sent = state._replace(runs=tuple(sorted((*state.runs, run)))).with_request(number, placed)
        return Step(f"the gateway sends {request.holder} to {worker} to {run.phase}", sent)

    def _take_back(self, state: State, number: int, with_ticket: bool = True) -> State:
        """One more attempt: from the ticket if there still is one, else from the start."""
        request = state.requests[number]
        attempt = request.attempt + 1
        if attempt > MAX_ATTEMPTS:
            return state.with_request(number, Request(0, "failed"))
        if request.ticket and with_ticket:
            again = request._replace(attempt=attempt, status="at_rest")
        else:
            again = Request(attempt, "queued", f"r{number}.{attempt}")
        return state.with_request(number, again)

    # The workers

    def _workers(self, state: State) -> Iterator[Step]:
        ledger = self.ledgers[state.ledger]
        for run in state.runs:
            lost = state.unanswered_by(run.worker)
            if run.phase == "unsure" or (lost and lost.run != run):
                continue
            yield from self._operate(state, run, lost)
            if run.holder in ledger.demands and run.runs and not lost:
                # it has read that it must give way
                giving_way = run._replace(phase="yield", blocks=())
                yield from self._operate(state.with_run(run, giving_way), giving_way, None)
        for worker in sorted(worker for worker, fenced in ledger.workers.items() if fenced):
            phases = {run.phase for run in state.runs if run.worker == worker}
            if worker not in state.dead and phases <= {"unsure"}:
                yield self._leave(state, worker)

    def _operate(self, state: State, run: Run, unanswered: Unanswered | None) -> Iterator[Step]:
        operation = run.operation()
        number, answer = self.ledgers.after(state.ledger, operation)
        self._check_fence(state, run, operation, number)
        label: Label = (run.worker, operation, answer, "again" if unanswered else "")
        if unanswered:
            self._check_same(state, run, operation, unanswered.answer, answer)
        done = state._replace(ledger=number, unanswered=None if unanswered else state.unanswered)
        yield Step(label, self._read(done, run, answer, unsure=unanswered is not None))
        if state.faults_left.losses and state.unanswered is None:
            lost = Unanswered(run, answer)
            faults_left = state.faults_left._replace(losses=state.faults_left.losses - 1)
            after = state._replace(ledger=number, unanswered=lost, faults_left=faults_left)
            yield Step((*label, "but the reply is lost"), after, fault=True)

    def _read(self, state: State, run: Run, answer: Answer, unsure: bool) -> State:
        """The worker reads the answer to `run`'s operation, and tells the gateway."""
        if answer.error == WorkerFenced.code:
            return state.with_run(run, run.fenced(unsure))
        request = state.requests[run.request]
        ours = request.holder == run.holder and request.worker == run.worker
        match run.phase, answer.error:
            case "allocate", (OutOfBlocks.code | MustWait.code):
                return state
            case "allocate", "":
                return state.with_run(run, _allocated(run, answer.value))
            case "commit", "":
                return state.with_run(run, run._replace(phase="detach"))
            case "detach", "":
                return self._at_rest(state, run, ours)
            case "rest", _:
                given_up = request.status == "at_rest" and request.holder == run.holder
                state = state.with_run(run, None)
                gone = given_up and not answer.error
                return self._take_back(state, run.request, with_ticket=False) if gone else state
            case "claim", "":
                state = self._tell_issuer(state, run.holder)
                grown = len(run.blocks) == NUM_FINAL_BLOCKS
                phase: Phase = "finish" if grown else "extend"
                state = state.with_run(run, run._replace(phase=phase, epoch=run.epoch + 1))
                claimed = request._replace(ticket=(), epoch=0)
                return state.with_request(run.request, claimed) if ours else state
            case "claim", StaleHolder.code:
                state = state.with_run(run, None)
                return self._take_back(state, run.request, with_ticket=False) if ours else state
            case "extend", "":
                return state.with_run(run, _extended(run, answer.value))
            case "finish", "":
                state = state.with_run(run, None)
                done = Request(0, "done")
                return state.with_request(run.request, done) if ours else state
            case "yield", "":
                return state.with_run(run, run._replace(phase="yielded", epoch=run.epoch + 1))
            case "yielded", "":
                state = state.with_run(run, run._replace(phase="place"))
                return self._take_back(state, run.request, with_ticket=False) if ours else state
            case "place", "":
                return state.with_run(run, None)
            case "let_go", "":
                return state.with_run(run, None)
            case "let_go", StaleHolder.code:
                # a detach may have been carried out before the fence
                retry = run._replace(epoch=run.epoch + 1) if run.epoch % 2 else None
                return state.with_run(run, retry)
        raise Violation(f"{run.worker} runs {run.holder}, but {run.phase} fails: {answer.error}")

    def _tell_issuer(self, state: State, holder: str) -> State:
        """The ticket is claimed: its issuer stops waiting."""
        for run in state.runs:
            if (run.holder, run.phase) == (holder, "rest"):
                state = state.with_run(run, None)
        return state

    def _at_rest(self, state: State, run: Run, ours: bool) -> State:
        """The worker gives the ticket to the gateway, and keeps the blocks until it is claimed."""
        epoch = run.epoch + 1
        state = state.with_run(run, run._replace(phase="rest", epoch=epoch, blocks=()))
        request = state.requests[run.request]
        ticket = request._replace(status="at_rest", ticket=run.blocks, epoch=epoch)
        return state.with_request(run.request, ticket) if ours else state

    def _leave(self, state: State, worker: str) -> Step:
        """A fenced worker without runs leaves the pool; if the ledger disagrees, it exits."""
        number, answer = self.ledgers.after(state.ledger, ("leave", (worker,)))
        runs = tuple(run for run in state.runs if run.worker != worker)
        if answer.error:
            return Step(f"{worker} exits", state._replace(runs=runs, dead=state.dead | {worker}))
        return Step(f"{worker} leaves", state._replace(ledger=number, runs=runs))

    # The block manager, and what goes wrong

    def _block_manager(self, state: State) -> Iterator[Step]:
        for worker in sorted(state.dead):
            number, _ = self.ledgers.after(state.ledger, ("reap", (worker,)))
            successor = worker[0] + str(int(worker[1:]) + 1)
            number, _ = self.ledgers.after(number, ("register_worker", (SPEC, successor)))
            label: Label = f"{worker} is reaped, {successor} takes its place"
            if state.late:
                number, late = self._deliver(number, state.late)
                label = (label, *late)
            reaped = state._replace(ledger=number, late=None, dead=state.dead - {worker})
            yield Step(label, reaped)

    def _faults(self, state: State) -> Iterator[Step]:
        workers = self.ledgers[state.ledger].workers
        left = state.faults_left
        for worker in self._victims(state):
            if left.crashes:
                yield from self._crash(state, worker)
            if left.fences and not workers[worker]:
                number, _ = self.ledgers.after(state.ledger, ("fence", (worker,)))
                faults_left = left._replace(fences=left.fences - 1)
                fenced = state._replace(ledger=number, faults_left=faults_left)
                yield Step(f"{worker} is fenced", fenced, fault=True)
        if left.retentions:
            yield from self._retain(state)
        if state.late:
            number, label = self._deliver(state.ledger, state.late)
            yield Step(label, state._replace(ledger=number, late=None), fault=True)

    def _retain(self, state: State) -> Iterator[Step]:
        """A client retains the prefix, for an hour or for no time at all, or ends the retention."""
        left = state.faults_left
        faults_left = left._replace(retentions=left.retentions - 1)
        prefix = "owner", "name"
        operations: tuple[Operation, ...] = (
            ("retain", (*prefix, 3_600_000, (PREFIX,), (1, 1))),
            ("retain", (*prefix, 0, (PREFIX,), (1, 1))),
            ("end_retention", prefix),
        )
        for operation in operations:
            number, _ = self.ledgers.after(state.ledger, operation)
            yield Step(operation, state._replace(ledger=number, faults_left=faults_left), True)

    def _victims(self, state: State) -> list[str]:
        """Every busy worker (an idle one has nothing to lose). While both workers are alike, v1
        stands for either."""
        busy = sorted({run.worker for run in state.runs})
        left = state.faults_left
        alike = (left.crashes, left.fences) == (self.faults.crashes, self.faults.fences)
        return [worker for worker in busy if worker == "v1" or not alike]

    def _deliver(self, number: int, late: Operation) -> tuple[int, tuple[object, ...]]:
        number, answer = self.ledgers.after(number, late)
        return number, ("late", late, answer)

    def _crash(self, state: State, worker: str) -> Iterator[Step]:
        own = [run for run in state.runs if run.worker == worker]
        dead = state._replace(
            runs=tuple(run for run in state.runs if run.worker != worker),
            unanswered=None if state.unanswered_by(worker) else state.unanswered,
            dead=state.dead | {worker},
            faults_left=state.faults_left._replace(crashes=state.faults_left.crashes - 1),
        )
        yield Step(f"{worker} dies", dead, fault=True)
        for operation in dict.fromkeys(run.operation() for run in own if run.phase != "unsure"):
            late = dead._replace(late=operation)
            yield Step(f"{worker} dies, {operation[0]} is on its way", late, fault=True)

    # The laws

    def check(self, state: State) -> None:
        """Law 3: every holder belongs to a worker that is alive or will be reaped. Law 4: a worker
        with a run of a holder owns the holder. Laws 2, 4 and 5: a block that a worker may still
        write belongs to it alone. Raises Violation. (Law 1 is audited with each ledger.)"""
        ledger = self.ledgers[state.ledger]
        known = {(run.worker, run.holder) for run in state.runs}
        for holder in ledger.holders.values():
            has_run = (holder.worker_id, holder.holder_id) in known
            if not has_run and holder.worker_id not in state.dead:
                raise Violation(f"no run has {holder.holder_id} of {holder.worker_id}")
        for run in state.runs:
            sent = state.unanswered is not None and state.unanswered.run == run
            if run.runs and not (sent and run.phase in ("detach", "finish")):
                self._check_owner(ledger, run)
                self._check_writes(ledger, run, sent)

    @staticmethod
    def _check_owner(ledger: Ledger, run: Run) -> None:
        holder = ledger.holders.get(run.holder)
        if holder is None:
            raise Violation(f"{run.worker} runs {run.holder}, which was released")
        if (holder.worker_id, holder.epoch) != (run.worker, run.epoch):
            owner = f"{holder.worker_id}'s at epoch {holder.epoch}"
            raise Violation(f"{run.worker} runs {run.holder} at {run.epoch}, but it is {owner}")
        if not holder.held.issuperset(run.blocks):
            raise Violation(f"{run.holder} holds {holder.held}, {run.worker} uses {run.blocks}")

    @staticmethod
    def _check_writes(ledger: Ledger, run: Run, sent: bool) -> None:
        first = 0 if run.phase == "commit" and not sent else 1
        for block in run.blocks[first:]:
            num_holders = ledger.blocks.refs.get(block, 0)
            if num_holders != 1:
                raise Violation(f"{run.worker} may write block {block}, held by {num_holders}")
            if block in ledger.blocks.hash_of:
                raise Violation(f"{run.worker} may write block {block}, which is published")

    def _check_fence(self, state: State, run: Run, operation: Operation, after: int) -> None:
        fenced = self.ledgers[state.ledger].workers[run.worker]
        if fenced and operation[0] != "release" and after != state.ledger:
            raise Violation(f"{run.worker} is fenced, but {operation[0]} changed the ledger")

    def _check_same(
        self, state: State, run: Run, operation: Operation, first: Answer, second: Answer
    ) -> None:
        """An operation that was carried out gets the same answer again, unless a fence came
        between."""
        fenced = self.ledgers[state.ledger].workers[run.worker] and operation[0] != "release"
        if _carried_out(first) and not fenced and _lasting(first) != _lasting(second):
            raise Violation(f"{operation[0]} was answered {first}, and {second} when sent again")


def spelled(label: Label) -> str:
    """The label as one line."""
    parts = (label,) if isinstance(label, str) else label
    return ", ".join(str(part) for part in parts if part != "")


def _allocated(run: Run, value: object) -> Run:
    assert isinstance(value, Allocation)
    phase: Phase = "detach" if value.num_cached_blocks else "commit"
    return run._replace(phase=phase, blocks=value.block_ids)


def _extended(run: Run, value: object) -> Run:
    assert isinstance(value, Extension)
    (grown,) = value.grown
    if grown.error == OutOfBlocks.code:
        return run
    if grown.error:
        raise Violation(f"{run.worker} runs {run.holder}, but extend fails: {grown.error}")
    return run._replace(phase="finish", blocks=run.blocks + grown.block_ids)


def _carried_out(answer: Answer) -> bool:
    if isinstance(answer.value, Extension):
        return not any(grown.error for grown in answer.value.grown)
    return not answer.error


def _lasting(answer: Answer) -> object:
    """The part of an answer that does not change: demands do."""
    return answer.value.grown if isinstance(answer.value, Extension) else answer
