"""How many workers of each role a run has: more are started, the youngest are drained."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.supervisor.child import Child, ChildSpec, Stage

MAX_WORKERS = 64
"""Of one role; more on one host is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class Change:
    """`number`: of workers of a role once the ones named `starting` serve and those `leaving` have
    left."""

    number: int
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


class Workforce:
    """`children`: all that the run ever started, in this order, the living and the ended."""

    def __init__(self, children: Sequence[Child], start: Callable[[ChildSpec], None]) -> None:
        self._children = children
        self._start = start

    def scale(self, wanted: Mapping[str, int | None]) -> dict[str, Change]:
        """Bring the workers of each role to its number; None leaves them as they are. Only asks:
        who starts loads for a while, who leaves has its running requests moved. ValueError, and
        nothing is changed: not a number of workers that a run can have."""
        for role, number in wanted.items():
            if number is not None and not 1 <= number <= MAX_WORKERS:
                raise ValueError(f"{role}={number}: a run has 1 to {MAX_WORKERS} of them")
        return {role: self._bring_to(role, number) for role, number in wanted.items()}

    def failing(self) -> dict[str, str]:
        """Workers that do not start, by name: why."""
        workers = (child for child in self._children if child.spec.stage is Stage.WORKER)
        return {child.name: child.failure for child in workers if child.failure}

    def _bring_to(self, role: str, number: int | None) -> Change:
        staying = [child for child in self._of(role) if child.is_staying]
        if number is None:
            return Change(len(staying))
        starting = [self._hire(role) for _ in range(number - len(staying))]
        leaving = staying[number:]
        for child in leaving:
            child.leave()
        return Change(number, tuple(starting), tuple(child.name for child in leaving))

    def _hire(self, role: str) -> str:
        """One more like the others, under a name that nobody had, with the ports of one that has
        ended, or the next ones."""
        earlier = self._of(role)
        index = 1 + max(int(child.name.rpartition("-")[2]) for child in earlier)
        taken = {child.spec.number for child in earlier if not child.has_ended}
        number = next(n for n in itertools.count() if n not in taken)
        spec = replace(earlier[0].spec, name=f"{role}-{index}", number=number)
        self._start(spec)
        return spec.name

    def _of(self, role: str) -> list[Child]:
        workers = [child for child in self._children if child.spec.stage is Stage.WORKER]
        return [child for child in workers if child.name.rpartition("-")[0] == role]
