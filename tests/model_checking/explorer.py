"""Exhaustive exploration of the block store's protocol: every interleaving, every state once.

`python -m tests.model_checking.explorer` visits, breadth first, every state of
`tests.model_checking.scenario`, of a recovery (`recovery_scenario`), of moves (`move_scenario`) and
of pulls (`pull_scenario`). It checks the laws in every state, and then that no state is stuck: from
each one, all requests can end without any further fault. The first violation found is one of those
with the shortest trace.
"""

import argparse
import gc
import sys
import time
from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from blockstore.memory.ledger import Ledger
from tests.model_checking.actors import Faults
from tests.model_checking.ledgers import Ledgers, Violation
from tests.model_checking.move_scenario import MoveScenario
from tests.model_checking.pull_scenario import PullFaults, PullScenario
from tests.model_checking.recovery_scenario import MakeRecovering, RecoveryScenario
from tests.model_checking.scenario import Label, MakeLedger, Scenario, spelled

EXPLORED = (Faults(crashes=1), Faults(losses=1), Faults(fences=1), Faults(retentions=2))
"""Each takes less than 20 seconds on one core. (A fenced worker may exit and be reaped in any
case.)"""

RECOVERY_FAULTS = 3
"""How many workers are stuck or die during a recovery, or after it."""

EXPLORED_IN_FULL = (
    *EXPLORED,
    Faults(crashes=1, losses=1),
    Faults(losses=1, fences=1),
    Faults(crashes=1, fences=1),
)
"""Also every pair of faults; the last pair has four million transitions."""


EXPLORED_MOVES = (Faults(moves=2, crashes=1), Faults(moves=2, losses=1), Faults(moves=2, fences=1))


class Explored(Protocol):
    """A scenario: its states are hashable, and a step has a label, a state, and whether it is a
    fault."""

    ledgers: Ledgers

    def start(self) -> Any: ...
    def finished(self, state: Any) -> bool: ...
    def served(self, state: Any) -> bool: ...
    def steps(self, state: Any) -> Iterator[Any]: ...
    def check(self, state: Any) -> None:
        """Raises Violation."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result. `num_finished`: states without a next step; `num_served`: those in which no
    request had failed. `trace`: leads to the violation; both are empty if every law holds."""

    num_states: int
    num_transitions: int
    num_ledgers: int
    num_finished: int
    num_served: int
    violation: str = ""
    trace: tuple[str, ...] = ()


class _Graph:
    """The states by number, the step by which each was first reached, and the steps that are no
    faults."""

    def __init__(self, start: Hashable) -> None:
        self.states = [start]
        self.num_transitions = 0
        self._numbers = {start: 0}
        self._parents = array("q", [-1])
        self._labels: list[Label] = [""]
        self._sources = array("q")
        self._targets = array("q")

    def add(self, source: int, label: Label, target: Hashable, fault: bool) -> bool:
        """Add a step; returns whether `target` is new."""
        self.num_transitions += 1
        number = self._numbers.setdefault(target, len(self.states))
        if not fault:
            self._sources.append(source)
            self._targets.append(number)
        if number < len(self.states):
            return False
        self.states.append(target)
        self._parents.append(source)
        self._labels.append(label)
        return True

    def trace(self, number: int) -> tuple[str, ...]:
        labels: list[str] = []
        while number:
            labels.append(spelled(self._labels[number]))
            number = self._parents[number]
        return tuple(reversed(labels))

    def first_stuck(self, finished: Sequence[int]) -> int | None:
        """The first state from which no state of `finished` can be reached without a fault."""
        backwards: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self._sources, self._targets, strict=True):
            backwards[target].append(source)
        alive = bytearray(len(self.states))
        todo = list(finished)
        while todo:
            number = todo.pop()
            if not alive[number]:
                alive[number] = True
                todo.extend(backwards[number])
        stuck = alive.find(0)
        return None if stuck < 0 else stuck


def explore(faults: Faults, make_ledger: MakeLedger = Ledger) -> Exploration:
    """Explore all states with these faults; stop at the first violation."""
    with _without_gc():
        return _explore(Scenario(make_ledger, faults))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Run without the cycle collector: there are millions of tuples and no cycle, and searching for
    cycles took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def explore_recovery(num_faults: int, make_ledger: MakeRecovering = Ledger) -> Exploration:
    """Explore a recovery in which so many workers are stuck or die."""
    with _without_gc():
        return _explore(RecoveryScenario(make_ledger, num_faults))


def explore_moves(faults: Faults, make_ledger: MakeLedger = Ledger) -> Exploration:
    """Explore a request that moves to another worker."""
    with _without_gc():
        return _explore(MoveScenario(make_ledger, faults))


def explore_pulls(faults: PullFaults, left_out: str = "") -> Exploration:
    """Explore a pull from one pool to another; `left_out`: see `PullScenario`."""
    with _without_gc():
        return _explore(PullScenario(faults, left_out))


def _explore(scenario: Explored) -> Exploration:
    graph = _Graph(scenario.start())
    finished: list[int] = []

    def result(violation: str = "", trace: tuple[str, ...] = ()) -> Exploration:
        num_states, num_ledgers = len(graph.states), len(scenario.ledgers)
        served = [number for number in finished if scenario.served(graph.states[number])]
        counts = (num_states, graph.num_transitions, num_ledgers, len(finished), len(served))
        return Exploration(*counts, violation, trace)

    for number, state in enumerate(graph.states):  # grows while it is walked through
        if scenario.finished(state):
            finished.append(number)
        try:
            scenario.check(state)
            for step in scenario.steps(state):
                graph.add(number, step.label, step.state, step.fault)
        except Violation as violation:
            return result(str(violation), graph.trace(number))
    stuck = graph.first_stuck(finished)
    if stuck is not None:
        return result("from here, not all requests can come to an end", graph.trace(stuck))
    return result()


def main() -> int:
    """Print the number of states; exit status 1 when a law is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_checking.explorer")
    parser.add_argument("--full", action="store_true", help="also two faults together")
    faults = EXPLORED_IN_FULL if parser.parse_args().full else EXPLORED
    explorations = {str(each): partial(explore, each) for each in faults}
    explorations |= {f"moves, {each}": partial(explore_moves, each) for each in EXPLORED_MOVES}
    explorations["pulls"] = partial(explore_pulls, PullFaults())
    explorations["a recovery"] = partial(explore_recovery, RECOVERY_FAULTS)
    for name, exploration in explorations.items():
        started = time.perf_counter()
        found = exploration()
        seconds = time.perf_counter() - started
        print(f"{name}: {found.num_states} states, {found.num_transitions} transitions", end=", ")
        print(f"{found.num_ledgers} ledgers, {found.num_finished} ends, {seconds:.1f} s")
        if found.violation:
            print(*found.trace, f"VIOLATION: {found.violation}", sep="\n", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
