"""The explorer's scenario of moves: a running request that continues at another worker, with three
workers, and gateways that join and leave.

    runs ──▶ detach ──▶ rest ──▶ its gateway has the ticket ──▶ claim ──▶ runs
               ▲          │ └──▶ parked ──▶ another gateway finds it ─▲
               │          └──▶ no worker has claimed it in time: release
               ├ handed over: its gateway asked for it
               └ its gateway is lost

The worker may ask for one more block just before, and the request comes to rest before the answer.
No message tells an issuer that its ticket was claimed: it learns it from its release, however late.
A lost gateway may have sent the ticket to a worker that still claims it, while another gateway
finds the ticket at its issuer and sends it to another worker. Workers die, are fenced and lose
replies as in `tests.model_checking.scenario`."""

from collections.abc import Callable, Iterator

from blockstore.errors import StaleHolder
from blockstore.memory.ledger import Ledger
from blockstore.records import Allocation
from tests.model_checking.actors import NUM_PROMPT_BLOCKS, PREFIX, Request, Run, State
from tests.model_checking.ledgers import Answer, Operation, Violation
from tests.model_checking.scenario import Scenario, Step


class MoveScenario(Scenario):
    """See `tests.model_checking.scenario.Scenario`. At the beginning r0 runs at v1, which has
    claimed it."""

    workers = ("v1", "w1", "u1")

    def start(self) -> State:
        holder, number = "r0.1", self.ledgers.first
        number, answer = self._done(number, "allocate", holder, "v1", 0, (PREFIX,), 2)
        assert isinstance(answer.value, Allocation)
        blocks = answer.value.block_ids
        number, _ = self._done(number, "commit", holder, 1, ((blocks[0], PREFIX),))
        number, _ = self._done(number, "detach", holder, 1)
        number, answer = self._done(number, "claim", holder, 2, "v1", blocks)
        runs = (Run("v1", holder, 0, "extend", 3, blocks),)
        return State(number, (Request(1, "placed", holder, "v1"),), runs, faults_left=self.faults)

    def _done(self, number: int, name: str, *arguments: object) -> tuple[int, Answer]:
        operation: Operation = (name, arguments)
        return self.ledgers.after(number, operation)

    @property
    def _actors(self) -> tuple[Callable[[State], Iterator[Step]], ...]:
        return (*super()._actors, self._others, self._moves)

    # Moves

    def _moves(self, state: State) -> Iterator[Step]:
        """Running requests are handed over, and workers lose their gateways."""
        left = state.faults_left
        if not left.moves:
            return
        moved = state._replace(faults_left=left._replace(moves=left.moves - 1))
        for run in state.runs:
            request = state.requests[run.request]
            if (request.holder, request.worker, request.status) != (
                run.holder,
                run.worker,
                "placed",
            ):
                continue
            for label, after in self._come_to_rest(moved, run):
                yield Step(f"{run.worker} is asked to hand {run.holder} over{label}", after, True)
        for number, request in enumerate(state.requests):
            if request.status in ("placed", "at_rest"):
                sought = Request(request.attempt, "sought", request.holder)
                label = f"the gateway of r{number} is gone"
                yield Step(label, moved.with_request(number, sought), fault=True)

    def _come_to_rest(self, state: State, run: Run) -> Iterator[tuple[str, State]]:
        """The request comes to rest, also with a growth whose answer comes too late."""
        if run.phase not in ("extend", "finish") or state.unanswered_by(run.worker):
            return
        resting = state.with_run(run, run._replace(phase="detach"))
        yield "", resting
        if run.phase == "extend":
            number, _ = self.ledgers.after(state.ledger, run.operation())
            yield ", while it grows", resting._replace(ledger=number)

    def _others(self, state: State) -> Iterator[Step]:
        """A gateway takes over the client of another one, and workers lose their gateways."""
        for number, request in enumerate(state.requests):
            if request.status != "sought":
                continue
            for run in state.runs:
                if run.holder != request.holder:
                    continue
                for label, after in self._come_to_rest(state, run):
                    yield Step(f"{run.worker} parks {run.holder}{label}", after)
                if run.phase == "rest" and not state.unanswered_by(run.worker):
                    yield from self._find(state, number, run)
            yield Step(f"nobody has r{number}", self._take_back(state, number, with_ticket=False))

    def _find(self, state: State, number: int, run: Run) -> Iterator[Step]:
        """The worker detaches the request again; the ledger knows whether it is still at rest
        there."""
        after, answer = self.ledgers.after(state.ledger, ("detach", (run.holder, run.epoch - 1)))
        if after != state.ledger:
            raise Violation(f"{run.holder} is at rest, and comes to rest again")
        if answer.error == StaleHolder.code:
            yield Step(f"{run.worker} has {run.holder} no more", state.with_run(run, None))
        elif not answer.error:
            attempt = state.requests[number].attempt
            ticket = Request(attempt, "at_rest", run.holder, run.worker, run.blocks, run.epoch)
            label = f"another gateway finds {run.holder} at {run.worker}"
            yield Step(label, state.with_request(number, ticket))

    def _send_out(self, state: State, number: int, request: Request, worker: str) -> Step:
        """A worker that has claimed this ticket for another gateway refuses it."""
        for run in state.runs:
            if (run.worker, run.holder) == (worker, request.holder) and run.phase != "rest":
                label = f"{worker} has claimed {request.holder} already"
                return Step(label, self._take_back(state, number, with_ticket=False))
        return super()._send_out(state, number, request, worker)

    def _at_rest(self, state: State, run: Run, ours: bool) -> State:
        """The worker knows the ticket as long as it keeps the blocks."""
        before = state.with_run(run, None)
        state = super()._at_rest(state, run, ours)
        (rest,) = set(state.runs) - set(before.runs)
        return state.with_run(rest, rest._replace(blocks=run.blocks))

    def _tell_issuer(self, state: State, holder: str) -> State:
        return state

    def _victims(self, state: State) -> list[str]:
        return sorted({run.worker for run in state.runs})

    # The laws

    def check(self, state: State) -> None:
        """Also: the worker that runs the request has its blocks in the order in which they were
        acquired, also those that other workers acquired."""
        super().check(state)
        ledger = self.ledgers[state.ledger]
        for run in state.runs:
            if run.runs and not state.unanswered_by(run.worker):
                self._check_table(ledger, run)

    @staticmethod
    def _check_table(ledger: Ledger, run: Run) -> None:
        acquired = tuple(ledger.holders[run.holder].acquired)
        if len(run.blocks) >= NUM_PROMPT_BLOCKS and acquired[: len(run.blocks)] != run.blocks:
            raise Violation(f"{run.worker} uses {run.blocks} of {run.holder}, which has {acquired}")
