"""`quire upgrade` of a run of toy services: the installed supervisor takes the place of the one
before, and keeps its services."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc

from quire.client import Client
from quire.sockets import living_sockets
from quire.v1.supervisor_pb2 import UpgradeRequest, UpgradeResponse
from quire.v1.supervisor_pb2_grpc import SupervisorStub
from tests.waiting import wait_until

from .toy_run import LIMIT_S, TOYS, Run, is_alive, scale


def upgrade(run: Run, *, begin: bool = False) -> UpgradeResponse | None:
    """None if the supervisor does not answer, as while it becomes the installed version."""
    with (
        suppress(grpc.RpcError),
        grpc.insecure_channel(f"unix:{run.directory}/supervisor.sock") as channel,
    ):
        return SupervisorStub(channel).Upgrade(UpgradeRequest(begin=begin), timeout=LIMIT_S)
    return None


def upgraded(run: Run) -> UpgradeResponse:
    """Upgrade the run, and wait for the upgrade's end."""
    begun = upgrade(run, begin=True)
    assert begun is not None
    assert begun.is_running

    def has_ended() -> UpgradeResponse | None:
        found = upgrade(run)
        return None if found is None or found.is_running else found

    ended = wait_until(has_ended, explain=run.text)
    assert ended is not None
    return ended


def with_another_supervisor(start: Callable[..., Run]) -> Run:
    """A run in which the installed supervisor has taken the place of the first one, and has
    replaced neither the workers nor the store."""
    run = start()
    run.wait_until_serving()
    hindrance = run.directory / "decode-cannot-start"
    hindrance.touch()
    assert upgraded(run).failure.startswith("decode-2 does not start")
    assert b"--handover=" in Path(f"/proc/{run.process.pid}/cmdline").read_bytes()
    hindrance.unlink()
    wait_until(lambda: len(run.pids("prefill")) == 1, explain=run.text)
    wait_until(lambda: len(run.pids("block_manager")) == 1, explain=run.text)
    return run


def test_an_upgrade_ends_where_a_new_process_does_not_start(start: Callable[..., Run]) -> None:
    """What is not replaced goes on, and what has started for nothing ends."""
    run = start()
    run.wait_until_serving()
    kept = run.pids("prefill"), run.pids("decode"), run.pids("redis")
    (gateway,) = run.pids("gateway")
    (run.directory / "decode-cannot-start").touch()
    ended = upgraded(run)
    assert ended.failure == "decode-2 does not start: error: there is no memory"
    first, *others = ended.steps
    assert first.startswith("the supervisor is version ")
    assert [step.partition(" ")[0] for step in others] == ["gateway", "block-manager"]
    wait_until(
        lambda: (run.pids("prefill"), run.pids("decode"), run.pids("redis")) == kept,
        explain=run.text,
    )
    assert run.pids("gateway") != [gateway]
    assert run.end() == 0


def test_a_gateway_that_does_not_start_leaves_the_operations_to_the_one_before(
    start: Callable[..., Run],
) -> None:
    """The command gets the upgrade's failure from that gateway, and operations go on there. The
    next upgrade replaces it; the path of its socket stays."""
    run = start()
    run.wait_until_serving()
    (gateway,) = run.pids("gateway")
    (socket,) = living_sockets(run.directory)
    (run.directory / "gateway-cannot-start").touch()
    ended = upgraded(run)
    assert ended.failure == "gateway does not start: error: there is no memory"
    assert run.pids("gateway") == [gateway]
    with Client(f"unix:{socket}") as client:
        assert {each.role for each in client.workers()} >= {"prefill", "decode"}
    wait_until(lambda: living_sockets(run.directory) == [socket], explain=run.text)
    (run.directory / "gateway-cannot-start").rename(run.directory / "decode-cannot-start")
    assert upgraded(run).failure.startswith("decode-2 does not start")
    wait_until(lambda: gateway not in run.pids("gateway"), explain=run.text)
    assert living_sockets(run.directory) == [socket]
    with Client(f"unix:{socket}") as client:
        assert {each.role for each in client.workers()} >= {"prefill", "decode"}


def test_the_next_supervisor_keeps_the_services_of_the_one_before(
    start: Callable[..., Run],
) -> None:
    """It sees their ends and their output, scales them, and ends them."""
    run = with_another_supervisor(start)
    for role in ("redis", "decode"):
        (victim,) = run.pids(role)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda r=role, pid=victim: run.pids(r) not in ([], [pid]), explain=run.text)  # type: ignore[misc]
    assert "redis ended (killed by signal 9); it starts again" in run.text()
    assert "decode-1 ended (killed by signal 9); it starts again" in run.text()
    assert list(scale(run, num_decode=2).starting) == ["decode-3"]  # names are not used twice
    wait_until(lambda: len(run.pids("decode")) == 2, explain=run.text)
    everyone = run.everyone()
    command = (sys.executable, "-m", "quire.cli", "down", "--run-root", str(run.root))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert run.process.wait(timeout=LIMIT_S) == 0
    assert not any(map(is_alive, everyone))
    assert not run.root.exists()


def test_the_next_supervisor_leaves_no_orphans_when_it_is_killed(
    start: Callable[..., Run],
) -> None:
    run = with_another_supervisor(start)
    everyone = run.everyone()
    assert len(everyone) == 5
    run.end(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, everyone)))


def test_a_signal_waits_while_one_supervisor_takes_the_place_of_another(
    start: Callable[..., Run],
) -> None:
    """The next one ends the run in order."""
    run = start()
    run.wait_until_serving()
    everyone = run.everyone()
    upgrade(run, begin=True)
    wait_until(lambda: "becomes the installed version" in run.text(), explain=run.text)
    assert run.end() == 0
    assert "ending: running requests may go on" in run.text()
    assert not any(map(is_alive, everyone))
    assert not run.root.exists()


def test_nothing_is_replaced_by_a_version_whose_supervisor_does_not_start(
    start: Callable[..., Run], short_path: Path
) -> None:
    model = short_path / "toys"
    model.symlink_to(TOYS)
    run = start(model=model)
    run.wait_until_serving()
    everyone = run.everyone()
    model.unlink()
    ended = upgraded(run)
    assert ended.failure == (
        "nothing is replaced, because the supervisor stays: the installed version does not start: "
        f"there is no directory {model}"
    )
    assert not ended.steps
    assert run.everyone() == everyone
    assert run.end() == 0
