"""Operations: tables, JSON, exit statuses."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from quire.cli import main
from quire.supervisor.run_directory import free_port
from quire.v1 import block_manager_pb2 as bm
from quire.v1 import inference_pb2 as inference
from quire.v1.supervisor_pb2 import ScaleRequest, ScaleResponse, UpgradeResponse
from quire.v1.worker_pb2 import WorkerLoad


def pool(**fields: Any) -> bm.Pool:
    return bm.Pool(
        pool_id="p-1", model="m", block_size=16, block_bytes=1 << 20, num_blocks=2048, **fields
    )


def worker(worker_id: str, **fields: Any) -> bm.Worker:
    return bm.Worker(
        worker_id=worker_id,
        role="decode",
        model="m",
        address="127.0.0.1:4000",
        pool_id="p-1",
        state="WORKER_STATE_DRAINING",
        load=WorkerLoad(num_running=2, num_free_slots=62),
        engine={"backend": "cpu", "isa": "avx2", "dtype": "bfloat16", "quantize": "none"},
        **fields,
    )


def audit(*violations: str) -> bm.PoolAudit:
    return bm.PoolAudit(
        pool_id="p-1",
        num_blocks=11,
        num_free=4,
        num_cached=3,
        num_held=4,
        num_holders=2,
        num_references=5,
        ledger_checked=True,
        violations=violations,
    )


def test_health(gateway: Any, capsys: Any) -> None:
    assert main(["health"]) == 0
    gateway.health.set("", HealthCheckResponse.NOT_SERVING)
    assert main(["health"]) == 1
    assert capsys.readouterr().out == "ready\nnot ready\n"


def test_pools(gateway: Any, capsys: Any) -> None:
    gateway.pools = [
        pool(
            **{"num_free": 1000, "num_cached": 48, "num_held": 1000, "num_retained": 9},
            **{"num_prefix_queries": 8, "num_prefix_hits": 6},
        )
    ]
    assert main(["pools"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "POOL  MODEL  MEMORY   BLOCKS   FREE  CACHED   HELD  RETAINED  WAITING  HIT RATE  LEDGER",
        "p-1   m      2.0 GiB   2,048  1,000      48  1,000         9        0  75%       whole",
    ]


def test_a_pool_that_recovers_says_so_and_whom_it_waits_for(gateway: Any, capsys: Any) -> None:
    gateway.pools = [pool(recovering=True, missing_worker_ids=["decode-1", "decode-2"])]
    assert main(["pools"]) == 0
    _, row, note = capsys.readouterr().out.splitlines()
    assert row.endswith("recovering")
    assert note == "p-1 waits for decode-1, decode-2"


def test_workers(gateway: Any, capsys: Any) -> None:
    started = int((time.time() - 11_530) * 1000)
    numbered = worker("decode-1-3fa85f64", started_unix_ms=started, pid=4711)
    gateway.worker_lists = [[numbered]]
    assert main(["workers"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "WORKER    ROLE    MODEL  STATE     UP     PID   ADDRESS         POOL  RUNNING  WAITING  "
        "FREE SLOTS  KERNELS",
        "decode-1  decode  m      draining  3h12m  4711  127.0.0.1:4000  p-1         2        0  "
        "        62  cpu avx2 bfloat16",
    ]


def test_workers_as_json(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1")]]
    assert main(["workers", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["worker_id"], found["engine"]["isa"]) == ("decode-1", "avx2")


def test_models(gateway: Any, capsys: Any) -> None:
    """ROOM is the longest request that a pool holds."""
    gateway.models = [
        inference.Model(id="m", max_model_len=1360, context=4096, block_size=16, dtype="int8")
    ]
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "MODEL  CONTEXT   ROOM  BLOCK SIZE  DTYPE",
        "m        4,096  1,360          16  int8",
    ]


def test_adapters(gateway: Any, capsys: Any) -> None:
    gateway.models = [inference.Model(id="m"), inference.Model(id="poet", parent="m")]
    assert main(["lora", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["ADAPTER  MODEL", "poet     m"]


def test_an_adapter_is_loaded_from_the_directory_that_the_caller_means(
    gateway: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway has another working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["lora", "load", "poet", "./poet"]) == 0
    assert main(["lora", "load", "poet", "/adapters/poet"]) == 0
    assert [each.path for each in gateway.requests] == [str(tmp_path / "poet"), "/adapters/poet"]
    assert "poet is served, on m" in capsys.readouterr().out


def test_an_empty_list_is_a_header(gateway: Any, capsys: Any) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out == "MODEL  CONTEXT  ROOM  BLOCK SIZE  DTYPE\n"


def test_a_clean_audit_exits_0(gateway: Any, capsys: Any) -> None:
    gateway.audits = [audit()]
    assert main(["audit", "--pool", "p-1"]) == 0
    assert gateway.requests[0].pool_id == "p-1"
    assert capsys.readouterr().out.splitlines()[1].endswith("checked  hold")


def test_an_audit_in_a_recovery_is_neither_clean_nor_broken(gateway: Any, capsys: Any) -> None:
    found = audit()
    found.ledger_checked, found.recovering = False, True
    gateway.audits = [found]
    assert main(["audit"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("recovering  not known")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_broken_law_exits_1_and_is_named(gateway: Any, capsys: Any, flags: list[str]) -> None:
    gateway.audits = [audit("block 3 has 2 references, 1 holder")]
    assert main(["audit", *flags]) == 1
    assert capsys.readouterr().err == "quire: p-1: block 3 has 2 references, 1 holder\n"


def test_drain_tells_what_still_runs(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1")]]
    assert main(["drain", "decode-1"]) == 0
    assert gateway.requests == [bm.DrainWorkerRequest(worker_id="decode-1")]
    assert capsys.readouterr().out == "decode-1 takes no new work; it still runs 3 requests\n"


def test_a_worker_takes_the_other_role(gateway: Any, capsys: Any) -> None:
    def listed(role: str) -> bm.Worker:
        found = worker("prefill-2-0a1b2c3d")
        found.role, found.state = role, bm.WORKER_STATE_SERVING
        return found

    gateway.worker_lists = [[listed("prefill")], [listed("prefill")], [listed("decode")]]
    assert main(["role", "prefill-2", "decode", "--wait"]) == 0
    asked = bm.DrainWorkerRequest(worker_id="prefill-2-0a1b2c3d", next_role="decode")
    assert gateway.requests == [asked]
    assert capsys.readouterr().out.splitlines() == [
        "prefill-2 becomes a decode worker; it still runs 3 requests",
        "prefill-2 serves as a decode worker",
    ]
    assert main(["role", "prefill-2", "gateway"]) == 2
    gateway.worker_lists = [[listed("prefill")], []]
    assert main(["role", "prefill-2", "decode", "--wait"]) == 1
    assert "prefill-2 has ended" in capsys.readouterr().err


def test_a_reload_names_the_workers_that_serve_the_new_weights(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1-0a1b2c3d"), worker("prefill-1-3fa85f64")]]
    assert main(["reload", "--model", "tiny"]) == 0
    assert gateway.requests == [bm.ReloadRequest(model="tiny")]
    assert capsys.readouterr().out == "the new weights are served by decode-1, prefill-1\n"
    gateway.worker_lists = [[]]
    assert main(["reload"]) == 0
    assert capsys.readouterr().out == "these weights are served already\n"


def test_a_worker_is_drained_by_its_address(gateway: Any, capsys: Any) -> None:
    """A pod knows its address, but not the worker's id."""
    gateway.worker_lists = [[worker("decode-1")]]
    assert main(["drain", "127.0.0.1:4000", "--force"]) == 0
    assert gateway.requests[-1] == bm.DrainWorkerRequest(worker_id="decode-1", force=True)


def test_a_worker_is_drained_by_its_name(gateway: Any, capsys: Any) -> None:
    """The name that `quire workers`, `quire scale` and the logs show."""
    gateway.worker_lists = [[worker("decode-1-0a1b2c3d"), worker("decode-2-3fa85f64")]]
    assert main(["drain", "decode-2"]) == 0
    assert gateway.requests[-1] == bm.DrainWorkerRequest(worker_id="decode-2-3fa85f64")
    assert capsys.readouterr().out.startswith("decode-2 takes no new work")


def test_worker_that_serves_has_the_name_before_its_fenced_predecessor(gateway: Any) -> None:
    new = worker("decode-1-00000002")
    new.state = bm.WORKER_STATE_SERVING
    gateway.worker_lists = [[worker("decode-1-00000001"), new]]
    assert main(["drain", "decode-1"]) == 0
    assert gateway.requests[-1] == bm.DrainWorkerRequest(worker_id="decode-1-00000002")


def test_a_name_on_two_hosts_is_refused_with_the_addresses(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1-00000001"), worker("decode-1-00000002")]]
    assert main(["drain", "decode-1"]) == 1
    assert "decode-1-00000001 at 127.0.0.1:4000, decode-1-00000002 at" in capsys.readouterr().err


def test_drain_waits_until_the_worker_has_left(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1")]] * 2 + [[worker("decode-2")]]
    assert main(["drain", "decode-1", "--wait", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"num_running": 3, "left": True}


def test_drain_does_not_wait_for_ever(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1")]]
    assert main(["drain", "decode-1", "--wait", "--timeout", "0"]) == 1
    assert capsys.readouterr().err == "quire: decode-1 is still there after 0 s\n"


def test_draining_an_unknown_worker_fails(gateway: Any, capsys: Any) -> None:
    gateway.worker_lists = [[worker("decode-1-3fa85f64"), worker("prefill-1-3fa85f64")]]
    assert main(["drain", "x"]) == 1
    assert capsys.readouterr().err == (
        "quire: there is no worker 'x'; the workers: decode-1, prefill-1\n"
    )
    assert gateway.requests == []


def serving(*worker_ids: str) -> list[bm.Worker]:
    role = "decode"
    return [bm.Worker(worker_id=w, role=role, state="WORKER_STATE_SERVING") for w in worker_ids]


def test_scale_says_who_comes_and_who_goes(gateway: Any, capsys: Any) -> None:
    gateway.scaled = ScaleResponse(
        num_prefill=2, num_decode=1, starting=["prefill-2"], leaving=["decode-3", "decode-2"]
    )
    assert main(["scale", "decode=1", "prefill=2"]) == 0
    assert gateway.requests == [ScaleRequest(num_prefill=2, num_decode=1)]
    assert capsys.readouterr().out == "to start: prefill-2\nto leave: decode-3, decode-2\n"


def test_scale_warns_of_more_workers_than_the_host_has_cpus(gateway: Any, capsys: Any) -> None:
    gateway.scaled = ScaleResponse(num_decode=3, warning="4 workers on 2 CPUs take turns")
    assert main(["scale", "decode=3"]) == 0
    assert capsys.readouterr().err == "quire: warning: 4 workers on 2 CPUs take turns\n"


def test_scale_waits_until_all_serve_and_nobody_else_is_there(gateway: Any, capsys: Any) -> None:
    gateway.scaled = ScaleResponse(num_prefill=1, num_decode=2)
    starting = [worker("decode-1"), *serving("decode-2")]
    gateway.worker_lists = [
        serving("decode-1"),
        starting,
        serving("decode-1", "decode-2", "decode-3"),
        serving("decode-1", "decode-2"),
    ]
    assert main(["scale", "decode=2", "--wait"]) == 0
    assert len(gateway.worker_lists) == 1
    assert not gateway.requests[0].HasField("num_prefill")
    assert capsys.readouterr().out == "1 prefill and 2 decode workers\n"


def test_scale_does_not_wait_for_a_worker_that_does_not_start(gateway: Any, capsys: Any) -> None:
    """A worker of another role that does not start is no failure either."""
    gateway.scaled = ScaleResponse(num_decode=2, failing={"prefill-1": "error: no memory"})
    gateway.worker_lists = [serving("decode-1"), serving("decode-1", "decode-2")]
    assert main(["scale", "decode=2", "--wait"]) == 0
    gateway.scaled.failing["decode-2"] = "error: the port is taken"
    gateway.worker_lists = [serving("decode-1")]
    capsys.readouterr()
    assert main(["scale", "decode=2", "--wait"]) == 1
    assert capsys.readouterr().err == (
        "quire: decode-2 does not start: error: the port is taken (it is started again and again)\n"
    )


@pytest.mark.parametrize("text", ["decode", "gateway=2", "decode=-1", "=2"])
def test_an_unscalable_role_is_wrong_usage(capsys: Any, text: str) -> None:
    assert main(["scale", text]) == 2
    assert "is neither decode=N nor prefill=N" in capsys.readouterr().err


def test_upgrade_prints_each_step_once_and_fails_with_the_reason(gateway: Any, capsys: Any) -> None:
    first = ["gateway serves."]
    gateway.upgrades = [
        UpgradeResponse(steps=first, is_running=True),
        UpgradeResponse(steps=first, failure="decode-2 does not start: no memory"),
    ]
    assert main(["upgrade"]) == 1
    out, err = capsys.readouterr()
    assert out == "gateway serves.\n"
    assert err == "quire: the upgrade has ended early: decode-2 does not start: no memory\n"
    assert [request.begin for request in gateway.requests] == [True, False]


def test_a_request_is_explained_by_the_gateway_that_served_it(gateway: Any, capsys: Any) -> None:
    """All gateways of the address are asked, also if one of them is away."""
    gateway.stories = [[], ["It came.", "It ended."], []]
    away = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = ["explain", "r1", "--address", f"{gateway.address},{away},{gateway.address}"]
    assert main(command) == 0
    assert capsys.readouterr().out == "It came.\nIt ended.\n"
    assert [each.request_id for each in gateway.requests] == ["r1", "r1"]
    assert main(["explain", "r2"]) == 1
    assert "no record" in capsys.readouterr().err
