"""Changes the number of workers of a run: lets workers take the other role, starts more of a role,
or drains those that have run the shortest."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from quire.reports import Scaled, Worker
from quire.supervisor.child import Child, ChildSpec
from quire.supervisor.models import ROLES
from quire.supervisor.options import MAX_SERVICES


class WorkerScaler:
    """Scales the workers of a run. `children` are all services that the run has ever started, in
    order of their start, including ended ones. `groups` has a spec for each role and model. A role
    keeps at least `fewest` workers, 0 where other hosts may have the others. `warn_of` returns a
    warning about a number of workers, or raises ValueError."""

    def __init__(
        self,
        children: Sequence[Child],
        start: Callable[[ChildSpec], Child],
        groups: Sequence[ChildSpec],
        fewest: int = 1,
        warn_of: Callable[[int], str] = lambda _number: "",
    ) -> None:
        self._children = children
        self._start = start
        self._groups = {(group.role, group.model): group for group in groups}
        self._fewest = fewest
        self._warn_of = warn_of

    def scale(self, wanted: Mapping[str, int | None], model: str = "") -> Scaled:
        """Bring each role of a model to its wanted number of workers; None leaves a role as it is.
        `model` may be empty if the run has only one.

        Returns at once: new workers still have to load the model, and leaving workers to move their
        running requests. Raises ValueError, and changes nothing, if a number is not one that a role
        may have, or if the model is not clear.
        """
        asked, model = model, self._chosen(model)
        warning, starting, leaving = self._check(wanted, model), list[str](), list[str]()
        num_prefill, num_decode = (
            self._scale_role(role, model, wanted.get(role), starting, leaving) for role in ROLES
        )
        names = tuple(starting), tuple(leaving)
        return Scaled(num_prefill, num_decode, *names, self.failing(asked), warning)

    def changes(
        self, wanted: Mapping[str, int | None], model: str, serving: Mapping[str, Worker]
    ) -> Iterator[tuple[Worker, str]]:
        """Yield workers that take the other role rather than leave while others start, each with
        that role. A role that is not in `wanted` gives idle workers, but keeps one.

        `serving` has the workers that serve, by name. Raises ValueError as `scale` does.
        """
        model = self._chosen(model)
        self._check(wanted, model)
        for role, other in (ROLES, ROLES[::-1]):
            lacking = (wanted.get(role) or 0) - len(self._staying(role, model))
            # First those that were started for the role, and so are named after it.
            there = sorted(
                self._staying(other, model),
                key=lambda child: (child.spec.role != role, -child.running_since),
            )
            able = [serving[child.name] for child in there if child.name in serving]
            kept = wanted.get(other)
            if kept is None:
                kept, able = 1, [worker for worker in able if worker.is_idle]
            yield from ((each, role) for each in able[: max(0, min(lacking, len(there) - kept))])

    def failing(self, model: str = "") -> dict[str, str]:
        """Return why workers of a model do not start, by worker name; an empty `model` means all
        models."""
        workers = (child for role in ROLES for child in self._workers(role, model))
        return {child.name: child.failure for child in workers if child.failure}

    def _check(self, wanted: Mapping[str, int | None], model: str) -> str:
        """Return what the operator should know about the number of workers of the run; nothing if
        that number does not grow. Raises ValueError if a role would have too many or too few."""
        for role, number in wanted.items():
            fewest = 0 if role == "prefill" and self._mixes(model) else self._fewest
            if number is not None and not fewest <= number <= MAX_SERVICES:
                raise ValueError(f"{role}={number}: a run has {fewest} to {MAX_SERVICES} of them")
        numbers = [
            len(self._staying(role, model)) if number is None else number
            for role, number in wanted.items()
        ]
        if not any(numbers):
            raise ValueError("a run without workers serves nothing: end it with `quire down`")
        now = {key: len(self._staying(*key)) for key in self._groups}
        then = now | {(role, model): n for role, n in wanted.items() if n is not None}
        grows = sum(then.values()) > sum(now.values())
        return self._warn_of(sum(then.values())) if grows else ""

    def _mixes(self, model: str) -> bool:
        """Whether the decode workers of a model prefill, too."""
        return self._groups["decode", model].environment.get("QUIRE_DECODE_MIX") == "true"

    def _chosen(self, name: str) -> str:
        names = sorted({model for _, model in self._groups})
        if name in names or (not name and len(names) == 1):
            return name or names[0]
        which = f"model {name!r} is not one of this run" if name else "the run has several models"
        raise ValueError(f"{which}: name one of {', '.join(names)}")

    def _scale_role(
        self, role: str, model: str, number: int | None, starting: list[str], leaving: list[str]
    ) -> int:
        """Start or drain workers of a role, and note their names; returns the role's number."""
        # A worker that has run longer serves if any does: those that start, or start again, leave.
        staying = sorted(self._staying(role, model), key=lambda child: child.running_since)
        if number is None:
            return len(staying)
        missing = range(number - len(staying))
        starting += [self.start_worker(role, model).name for _ in missing]
        for child in staying[number:]:
            child.drain()
            leaving.append(child.name)
        return number

    def start_worker(self, role: str, model: str) -> Child:
        """Start one more worker. Its name is one that no worker had before.

        The worker gets the lowest `number` that no running worker has, and so that number's ports.
        """
        alike = [child for child in self._children if child.spec.role == role]
        index = 1 + max((int(child.name.rpartition("-")[2]) for child in alike), default=0)
        taken = {child.spec.number for child in alike if not child.has_ended}
        number = next(n for n in itertools.count() if n not in taken)
        spec = self._groups[role, model].worker(index, number)
        return self._start(spec)

    def _staying(self, role: str, model: str) -> list[Child]:
        return [child for child in self._workers(role, model) if child.is_staying]

    def _workers(self, role: str, model: str = "") -> list[Child]:
        """Return the workers that have a role now, of a model; an empty `model` means all."""
        return [
            child
            for child in self._children
            if child.role == role and model in ("", child.spec.model)
        ]
