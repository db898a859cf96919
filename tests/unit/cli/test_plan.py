"""`quire plan`: its table, what `--apply` changes, and the input that it refuses."""

from typing import Any

import pytest

from quire.cli import main
from quire.v1 import block_manager_pb2 as bm
from quire.v1.supervisor_pb2 import ScaleRequest
from quire.v1.worker_pb2 import WorkerLoad

from .test_operations import pool, worker


def serving(number: int = 1, **fields: Any) -> bm.Worker:
    found = worker(f"decode-{number}")
    found.MergeFrom(bm.Worker(state=bm.WORKER_STATE_SERVING, **fields))
    return found


def scaled(gateway: Any) -> list[tuple[str, int]]:
    asked = (request for request in gateway.requests if isinstance(request, ScaleRequest))
    return [(each.model, each.num_decode) for each in asked]


def test_a_plan_is_a_table(gateway: Any, capsys: Any) -> None:
    full = serving()
    full.load.num_free_slots = 0
    gateway.worker_lists, gateway.pools = [[full]], [pool(num_held=4)]
    assert main(["plan", "--window", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MODEL", "ROLE", "WORKERS", "NEEDED", "RECOMMENDED", "BECAUSE"]
    assert lines[2].split()[:5] == ["m", "decode", "1", "1.25", "2"]


def test_decode_workers_that_prefill_need_no_prefill_workers(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists, gateway.pools = [[serving(engine={"mix": "true"})]], [pool(num_held=4)]
    assert main(["plan", "--window", "0", "--total", "3", "--apply"]) == 0
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[:3] == ["m", "decode", "1"]
    (asked,) = (each for each in gateway.requests if isinstance(each, ScaleRequest))
    assert (asked.HasField("num_prefill"), asked.num_decode) == (False, 3)


def test_a_plan_is_applied_to_each_model(gateway: Any) -> None:
    gateway.worker_lists = [[serving(number, model=f"m{number}") for number in range(2)]]
    assert main(["plan", "--window", "0", "--apply"]) == 0
    assert scaled(gateway) == [("m0", 1), ("m1", 1)]


def test_a_plan_for_several_hosts_is_not_applied(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[serving(number, pool_id=f"p-{number}") for number in range(2)]]
    assert main(["plan", "--window", "0", "--apply"]) == 2
    assert "m has workers on 2 hosts, and --apply scales one host" in capsys.readouterr().err
    assert not scaled(gateway)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ttft", "0"], "Input should be greater than or equal to 0.001"),
        (["--ttft", "-1"], "Input should be greater than or equal to 0.001"),
        (["--ttft", "nan"], "Input should be greater than or equal to 0.001"),
        (["--inter-token", "nan"], "Input should be greater than or equal to 0.001"),
        (["--inter-token", "fast"], "Input should be a valid number"),
        (["--window", "-1"], "Input should be greater than or equal to 0"),
        (["--window", "nan"], "Input should be greater than or equal to 0"),
        (["--total", "1"], "Input should be greater than or equal to 2"),
    ],
)
def test_wrong_targets_are_refused(gateway: Any, capsys: Any, flags: list[str], text: str) -> None:
    gateway.worker_lists = [[serving()]]
    assert main(["plan", "--window", "0", "--apply", *flags]) == 2
    error = capsys.readouterr().err
    assert flags[0] in error
    assert text in error
    assert not scaled(gateway)


def test_without_a_gateway_the_error_says_where_none_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("QUIRE_OPERATIONS_ADDRESS", "127.0.0.1:1")
    assert main(["plan", "--address", "127.0.0.1:1", "--window", "0"]) == 3
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--apply"], ["--json"]])
@pytest.mark.parametrize("role", [None, "mover", "gateway"])
def test_without_workers_there_is_nothing_to_plan(
    gateway: Any, capsys: Any, flags: list[str], role: str | None
) -> None:
    """Movers have a model too, but no load."""
    gateway.worker_lists = [[serving(role=role)] if role else []]
    assert main(["plan", "--window", "0", *flags]) == 1
    assert "no model is served now" in capsys.readouterr().err
    assert not scaled(gateway)


def test_workers_that_have_measured_nothing_keep_their_number(gateway: Any, capsys: Any) -> None:
    empty = serving()
    empty.load.CopyFrom(WorkerLoad())
    gateway.worker_lists = [[empty]]
    assert main(["plan", "--window", "0"]) == 0
    (decode,) = (line for line in capsys.readouterr().out.splitlines() if "decode" in line)
    assert decode.split()[:5] == ["m", "decode", "1", "0.00", "1"]
