"""Which workers start and leave when a run is scaled, and how many there may be."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from quire.reports import Worker
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

    def __post_init__(self) -> None:
        self.role = self.spec.role

    @property
    def name(self) -> str:
        return self.spec.name

    def drain(self) -> None:
        self.is_staying = False


def scaler_of(
    *models: str, warn_of: Callable[[int], str] = lambda _: "", mix: str = "false"
) -> tuple[WorkerScaler, list[Any]]:
    """A scaler of a run in which each model has one worker of each role, which all serve."""
    groups = [
        ChildSpec(role, (), Stage.WORKER, {"QUIRE_DECODE_MIX": mix}, role=role, model=model)
        for role in ("prefill", "decode")
        for model in models
    ]
    numbers = [number for _role in range(2) for number in range(len(models))]
    children: list[Any] = [
        Process(group.worker(number + 1, number), running_since=float(number))
        for group, number in zip(groups, numbers, strict=True)
    ]

    def start(spec: ChildSpec) -> Any:
        children.append(Process(spec))
        return children[-1]

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
    with pytest.raises(ValueError, match="the run has several models: name one of a, b"):
        scaler.scale({"decode": 3})
    with pytest.raises(ValueError, match="model 'c' is not one of this run"):
        scaler.scale({"decode": 3}, "c")
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


def test_workers_that_mix_need_no_prefill_workers() -> None:
    wanted = {"prefill": 0, "decode": None}
    assert scaler_of("m", mix="true")[0].scale(wanted).leaving == ("prefill-1",)
    with pytest.raises(ValueError, match="decode=0: a run has 1 to"):
        scaler_of("m", mix="true")[0].scale({"prefill": None, "decode": 0})
    with pytest.raises(ValueError, match="prefill=0: a run has 1 to"):
        scaler_of("m")[0].scale(wanted)


def test_workers_on_a_gpu_need_no_cpu_each() -> None:
    assert crowding(60, is_on_gpu=True, num_cpus=2) == ""


def serving(*names: str, busy: str = "") -> dict[str, Worker]:
    return {
        name: Worker(
            f"{name}-0000000a",
            name[:-2],
            "",
            "pool",
            "m",
            "serving",
            0,
            0,
            0,
            0,
            {},
            0,
            busy_permille=500 if name == busy else 0,
            name=name,
        )
        for name in names
    }


def four_workers() -> tuple[WorkerScaler, list[Any]]:
    scaler, children = scaler_of("m")
    scaler.scale({"prefill": 2, "decode": 2})
    named(children, "prefill-2").running_since = 7.0
    named(children, "decode-2").running_since = 8.0
    return scaler, children


def changes(
    scaler: WorkerScaler, wanted: dict[str, int | None], workers: dict[str, Worker]
) -> list[tuple[str, str]]:
    return [(worker.name, role) for worker, role in scaler.changes(wanted, "", workers)]


ALL_FOUR = "prefill-1", "prefill-2", "decode-1", "decode-2"


def test_workers_take_the_other_role_rather_than_leave_while_others_start() -> None:
    scaler, children = four_workers()
    wanted: dict[str, int | None] = {"prefill": 1, "decode": 4}
    assert changes(scaler, wanted, serving(*ALL_FOUR)) == [("prefill-2", "decode")]
    named(children, "prefill-2").role = "decode"
    scaled = scaler.scale(wanted)
    assert (scaled.starting, scaled.leaving) == (("decode-3",), ())


def test_a_worker_with_another_role_keeps_its_name_and_number() -> None:
    """The next worker of its old role gets neither of them, nor its ports."""
    scaler, children = four_workers()
    named(children, "decode-2").role = "prefill"
    assert scaler.scale({"decode": 2}).starting == ("decode-3",)
    assert named(children, "decode-3").spec.number == 2
    back = changes(scaler, {"prefill": 2, "decode": 3}, serving(*ALL_FOUR))
    assert back == [("decode-2", "decode")]
    assert scaler.scale({"prefill": 2}).leaving == ("decode-2",)


def test_only_an_idle_worker_leaves_a_role_that_keeps_its_number() -> None:
    """`quire scale decode=4` says nothing of prefill, which keeps at least one worker."""
    scaler, _ = four_workers()
    wanted: dict[str, int | None] = {"prefill": None, "decode": 4}
    assert changes(scaler, wanted, serving(*ALL_FOUR)) == [("prefill-2", "decode")]
    busy = serving(*ALL_FOUR, busy="prefill-2")
    assert changes(scaler, wanted, busy) == [("prefill-1", "decode")]
    assert not changes(scaler, wanted, serving("decode-1", "decode-2"))
    assert not changes(scaler, {"prefill": 2, "decode": 4}, serving(*ALL_FOUR))
    with pytest.raises(ValueError, match="decode=99"):
        changes(scaler, {"decode": 99}, serving(*ALL_FOUR))
