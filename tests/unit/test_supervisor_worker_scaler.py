"""Which workers start and leave when a run is scaled, and how many there may be."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from quire.supervisor.child import ChildSpec, Stage
from quire.supervisor.crowding import crowding
from quire.supervisor.worker_scaler import WorkerScaler


@dataclass
class Process:
    """In the place of a child: only what the scaler sees of it."""

    spec: ChildSpec
    running_since: float = math.inf
    is_staying: bool = True
    has_ended: bool = False
    failure: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    def drain(self) -> None:
        self.is_staying = False


def scaler_of(
    *models: str, warn_of: Callable[[int], str] = lambda _: ""
) -> tuple[WorkerScaler, list[Any]]:
    """A scaler of a run in which each model has one worker of each role, which all serve."""
    groups = [
        ChildSpec(role, (), Stage.WORKER, role=role, model=model)
        for role in ("prefill", "decode")
        for model in models
    ]
    numbers = [number for _role in range(2) for number in range(len(models))]
    children: list[Any] = [
        Process(group.worker(number + 1, number), running_since=float(number))
        for group, number in zip(groups, numbers, strict=True)
    ]
    start = lambda spec: children.append(Process(spec))  # noqa: E731
    return WorkerScaler(children, start, groups, warn_of=warn_of), children


def named(children: list[Any], name: str) -> Any:
    return next(child for child in children if child.name == name)


def test_worker_that_serves_stays_while_its_replacement_starts() -> None:
    """decode-1 has crashed and starts again; decode-2 serves."""
    scaler, children = scaler_of("m")
    scaler.scale({"decode": 2})
    named(children, "decode-2").running_since = 5.0
    named(children, "decode-1").running_since = 60.0
    assert scaler.scale({"decode": 1}).leaving == ("decode-1",)


def test_worker_whose_process_has_not_started_leaves_first() -> None:
    scaler, children = scaler_of("m")
    scaler.scale({"decode": 3})
    named(children, "decode-3").running_since = 9.0
    assert scaler.scale({"decode": 2}).leaving == ("decode-2",)


def test_workers_of_all_models_have_different_names() -> None:
    """A name tells one worker of the run, so it needs no model."""
    scaler, children = scaler_of("a", "b")
    assert [child.name for child in children] == ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    assert scaler.scale({"decode": 2}, "a").starting == ("decode-3",)
    assert scaler.scale({"decode": 2}, "b").starting == ("decode-4",)
    settings = named(children, "decode-4").spec.environment
    assert settings["QUIRE_DECODE_WORKER_NUMBER"] == "4"


def test_failing_workers_are_those_of_the_model() -> None:
    scaler, children = scaler_of("a", "b")
    named(children, "decode-2").failure = "error: no memory"
    assert scaler.failing("a") == {}
    assert scaler.failing("b") == scaler.failing() == {"decode-2": "error: no memory"}


def test_more_workers_than_cpus_are_warned_of_and_many_more_refused() -> None:
    warn_of = partial(crowding, is_on_gpu=False, num_cpus=2)
    scaler, children = scaler_of("m", warn_of=warn_of)
    assert scaler.scale({"decode": 1}).warning == ""
    changes = scaler.scale({"decode": 3})
    assert changes.warning == "4 workers on 2 CPUs take turns, so that each is slower"
    with pytest.raises(ValueError, match=r"51 workers on 2 CPUs are too many: .* 16 here"):
        scaler.scale({"decode": 50})
    assert len(children) == 4
    assert scaler.scale({"decode": 2}).warning == ""  # fewer than before


def test_workers_on_a_gpu_need_no_cpu_each() -> None:
    assert crowding(60, is_on_gpu=True, num_cpus=2) == ""
