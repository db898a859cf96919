"""Changes the number of workers of a run: starts more of a role, or drains its newest ones."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.supervisor.child import Child, ChildSpec, Stage

MAX_WORKERS = 64
"""The most workers of one role. A larger number on one host is a typing error."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change to one role. `number`: the workers of the role once those in `starting` serve and
    those in `leaving` have left."""

    number: int
    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


class WorkerScaler:
    """Scales the workers of a run. `children`: all services that the run has ever started, in order
    of their start, including ended ones."""

    def __init__(self, children: Sequence[Child], start: Callable[[ChildSpec], None]) -> None:
        self._children = children
        self._start = start

    def scale(self, wanted: Mapping[str, int | None], model: str = "") -> dict[str, Change]:
        """Bring each role of a model to its wanted number of workers; None leaves a role as it is.
        `model`: may be empty if the run has only one.

        Returns at once: new workers still have to load the model, and leaving workers to move their
        running requests. ValueError: a number is not between 1 and MAX_WORKERS, or the model is not
        clear; nothing is changed.
        """
        model = self._chosen(model)
        for role, number in wanted.items():
            if number is not None and not 1 <= number <= MAX_WORKERS:
                raise ValueError(f"{role}={number}: a run has 1 to {MAX_WORKERS} of them")
        return {role: self._scale_role(role, model, number) for role, number in wanted.items()}

    def failing(self) -> dict[str, str]:
        """The reasons why workers do not start, by worker name."""
        workers = (child for child in self._children if child.spec.stage is Stage.WORKER)
        return {child.name: child.failure for child in workers if child.failure}

    def _chosen(self, name: str) -> str:
        names = sorted({child.spec.model for child in self._workers()})
        if name in names or (not name and len(names) == 1):
            return name or names[0]
        which = f"model {name!r} is not one of this run" if name else "the run has several models"
        raise ValueError(f"{which}: name one of {', '.join(names)}")

    def _scale_role(self, role: str, model: str, number: int | None) -> Change:
        staying = [child for child in self._workers(role, model) if child.is_staying]
        if number is None:
            return Change(len(staying))
        starting = [self._start_worker(role, model) for _ in range(number - len(staying))]
        leaving = staying[number:]
        for child in leaving:
            child.drain()
        return Change(number, tuple(starting), tuple(child.name for child in leaving))

    def _start_worker(self, role: str, model: str) -> str:
        """Start one more worker, with the settings of its model's first one. Returns its name,
        which no worker had before.

        The worker gets the lowest `number` that no running worker has, and so that number's ports.
        """
        earlier = self._workers(role, model)
        index = 1 + max(int(child.name.rpartition("-")[2]) for child in earlier)
        taken = {child.spec.number for child in self._workers(role) if not child.has_ended}
        number = next(n for n in itertools.count() if n not in taken)
        group = earlier[0].name.rpartition("-")[0]
        spec = replace(earlier[0].spec, name=f"{group}-{index}", number=number)
        self._start(spec)
        return spec.name

    def _workers(self, role: str = "", model: str = "") -> list[Child]:
        """The workers of a role and a model; empty: of all."""
        workers = [child for child in self._children if child.spec.model]
        return [
            child
            for child in workers
            if role in ("", child.spec.role) and model in ("", child.spec.model)
        ]
