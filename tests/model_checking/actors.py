"""The actors of the explorer's scenario and their states, as plain, hashable values."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from blockstore.records import Allocation, Claim, Extension, Grown, Growth, PrefixHash
from tests.model_checking.ledgers import Answer, Operation, Renaming

PREFIX: PrefixHash = b"of 16 bytes only"
NUM_PROMPT_BLOCKS = 2
NUM_FINAL_BLOCKS = 3

Phase = Literal[
    "allocate",
    "commit",
    "detach",
    "rest",
    "claim",
    "extend",
    "finish",
    "yield",
    "yielded",
    "place",
    "let_go",
    "unsure",
]
Status = Literal["queued", "placed", "at_rest", "sought", "done", "failed"]


class Run(NamedTuple):
    """A worker's knowledge of one holder, and its next operation."""

    worker: str
    holder: str
    request: int
    phase: Phase
    epoch: int = 1
    blocks: tuple[int, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the worker computes with the blocks until its next operation."""
        return self.phase in ("commit", "detach", "extend", "finish")

    def operation(self) -> Operation:
        """The worker's next operation. An issuer's, while its ticket is at rest, is to release it
        after the time limit."""
        match self.phase:
            case "allocate":
                # the request's number is its place in line
                asked = (self.request, (PREFIX,), NUM_PROMPT_BLOCKS)
                return "allocate", (self.holder, self.worker, *asked)
            case "commit":
                return "commit", (self.holder, self.epoch, ((self.blocks[0], PREFIX),))
            case "detach" | "yield":
                return "detach", (self.holder, self.epoch)
            case "claim":
                return "claim", (self.holder, self.epoch, self.worker)
            case "extend":
                growth = Growth(self.holder, self.epoch, NUM_PROMPT_BLOCKS, NUM_FINAL_BLOCKS)
                return "extend", (self.worker, (growth,))
            case "yielded":
                return "release", (self.holder, self.epoch, True)
            case "place":
                return "withdraw", (self.holder,)
            case _:
                return "release", (self.holder, self.epoch)

    def fenced(self, unsure: bool) -> "Run | None":
        """The state of the run after its worker reads FENCED; `unsure`: a reply was lost before.

        A claim that may have been carried out must not be released: epoch + 1 could be that of the
        next claimer. All other holders belong to this worker alone.
        """
        if self.phase == "claim":
            return self._replace(phase="unsure", blocks=()) if unsure else None
        if self.phase == "allocate" and not unsure:
            return None
        return self._replace(phase="let_go", blocks=())


class Request(NamedTuple):
    """The gateway's knowledge of a request. `ticket`: the blocks of the ticket that it can send, if
    any, which is at rest at `epoch`."""

    attempt: int
    status: Status
    holder: str = ""
    worker: str = ""
    ticket: tuple[int, ...] = ()
    epoch: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ("done", "failed")


class Unanswered(NamedTuple):
    """An operation that was carried out, but whose answer the worker never read."""

    run: Run
    answer: Answer


class Faults(NamedTuple):
    """How often each fault may happen: a worker dies, a reply is lost, a worker is fenced, a
    running request is handed over, a gateway is lost, the prefix is retained or its retention ends.
    """

    crashes: int = 0
    losses: int = 0
    fences: int = 0
    moves: int = 0
    retentions: int = 0


class State(NamedTuple):
    """The whole state. `ledger`: a number in `Ledgers`. `dead`: workers that are not reaped yet.
    `late`: operations of dead workers that have not reached the ledger."""

    ledger: int
    requests: tuple[Request, ...]
    runs: tuple[Run, ...] = ()
    unanswered: Unanswered | None = None
    late: Operation | None = None
    dead: frozenset[str] = frozenset()
    faults_left: Faults = Faults()

    def with_run(self, old: Run, new: Run | None) -> "State":
        """The state with `new` in the place of `old`, or without `old`."""
        rest = [run for run in self.runs if run != old]
        return self._replace(runs=tuple(sorted([*rest, new] if new else rest)))

    def with_request(self, number: int, request: Request) -> "State":
        requests = self.requests
        return self._replace(requests=(*requests[:number], request, *requests[number + 1 :]))

    def unanswered_by(self, worker: str) -> Unanswered | None:
        """The operation that `worker` has to send again before any other, if there is one."""
        lost = self.unanswered
        return lost if lost is not None and lost.run.worker == worker else None

    def names(self) -> frozenset[str]:
        """Holders and workers with an operation that may reach the ledger once more."""
        again = {self.unanswered.run.holder} if self.unanswered else set()
        return frozenset(again | set(_names(self.late)))

    def renamed(self, ledger: int, renaming: Renaming) -> "State":
        """The same state over a ledger whose blocks are renamed."""
        if renaming == tuple(range(len(renaming))):
            return self._replace(ledger=ledger)
        lost = self.unanswered
        return self._replace(
            ledger=ledger,
            requests=tuple(r._replace(ticket=_ids(r.ticket, renaming)) for r in self.requests),
            runs=tuple(sorted(_run(run, renaming) for run in self.runs)),
            unanswered=lost
            and Unanswered(_run(lost.run, renaming), _answer(lost.answer, renaming)),
            late=self.late and _operation(self.late, renaming),
        )


def _names(operation: Operation | None) -> Iterator[str]:
    for argument in operation[1] if operation else ():
        if isinstance(argument, str):
            yield argument
        elif isinstance(argument, tuple):
            yield from (growth.holder_id for growth in argument if isinstance(growth, Growth))


def _ids(block_ids: tuple[int, ...], renaming: Renaming) -> tuple[int, ...]:
    return tuple(renaming[block_id] for block_id in block_ids)


def _run(run: Run, renaming: Renaming) -> Run:
    return run._replace(blocks=_ids(run.blocks, renaming))


def _answer(answer: Answer, renaming: Renaming) -> Answer:
    value = answer.value
    if isinstance(value, Allocation):
        ids = _ids(value.block_ids, renaming)
        value = replace(value, block_ids=ids)
    elif isinstance(value, Claim):
        value = replace(value, block_ids=_ids(value.block_ids, renaming))
    elif isinstance(value, Extension):
        grown = (Grown(g.holder_id, _ids(g.block_ids, renaming), g.error) for g in value.grown)
        value = Extension(tuple(grown), value.demands)
    return Answer(answer.error, value)


def _operation(operation: Operation, renaming: Renaming) -> Operation:
    name, arguments = operation
    if name != "commit":
        return operation
    *holder, blocks = arguments
    assert isinstance(blocks, tuple)
    renamed: Hashable = tuple((renaming[block_id], prefix) for block_id, prefix in blocks)
    return name, (*holder, renamed)
