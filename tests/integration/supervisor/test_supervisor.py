"""`quire serve` as a process, with a real Valkey and toy services: it starts, repairs and ends
them."""

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.waiting import wait_until

from .toy_run import LIMIT_S, Run, is_alive, scale


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_run_leaves_nothing_behind(start: Callable[..., Run], number: signal.Signals) -> None:
    """Its services are groups of their own in one session: Ctrl-C on a terminal then reaches only
    the supervisor, and Linux, which gives each session its own share of a CPU, switches between
    workers that share one within milliseconds. Only its own user reaches its sockets."""
    run = start()
    run.wait_until_serving()
    everyone = run.everyone()
    assert len(everyone) == 5
    for pid in everyone:
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(run.process.pid))
    sockets = [path.name for path in run.directory.iterdir() if path.is_socket()]
    assert {"redis.sock", "supervisor.sock"} < set(sockets)
    for directory in (run.directory, run.root):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert (run.directory / "redis.sock").stat().st_mode & 0o077 == 0
    assert run.end(number) == 0
    assert not any(map(is_alive, everyone))
    assert not run.root.exists()


def test_services_that_end_are_restarted(start: Callable[..., Run]) -> None:
    """Those that are killed, and those that exit unasked."""
    run = start()
    run.wait_until_serving()

    def is_back(role: str, victim: int) -> bool:
        return run.pids(role) not in ([], [victim])

    killed = [(role, signal.SIGKILL) for role in ("redis", "decode", "gateway")]
    ended = [(role, signal.SIGTERM) for role in ("redis", "block_manager")]
    for role, number in killed + ended:
        (victim,) = run.pids(role)
        os.kill(victim, number)
        wait_until(partial(is_back, role, victim), explain=run.text)
    assert run.text().count("ended (status 0); it starts again") == len(ended)
    assert run.end() == 0


def test_a_killed_supervisor_leaves_no_orphans(start: Callable[..., Run]) -> None:
    """The next run removes its directory and takes its ports."""
    run = start()
    run.wait_until_serving()
    everyone, directory = run.everyone(), run.directory
    run.end(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, everyone)))
    assert directory.exists()
    following = start(grpc_port=run.grpc_port)
    following.wait_until_serving()
    assert not directory.exists()
    assert following.end() == 0


def test_two_runs_on_other_ports_live_side_by_side(start: Callable[..., Run]) -> None:
    first, second = start(), start()
    first.wait_until_serving()
    second.wait_until_serving()
    assert first.end() == 0
    assert len(second.everyone()) == 5
    assert second.end() == 0


def test_a_service_that_cannot_start_ends_the_run_with_its_reason(
    start: Callable[..., Run],
) -> None:
    run = start(decode="cannot-start")
    assert run.process.wait(timeout=LIMIT_S) == 1
    assert run.text().endswith("quire: decode-1 cannot start: error: there is no memory\n")
    assert run.text().count("\nerror: there is no memory\n") == 1  # and not tried again
    assert not run.root.exists()


def test_options_with_which_no_worker_could_start_end_the_run_before_any_service_starts(
    start: Callable[..., Run],
) -> None:
    run = start(flags=("--pool-memory", "1MiB"))
    assert run.process.wait(timeout=LIMIT_S) == 1
    assert run.text() == "quire: prefill-1 cannot start: pool memory is too small\n"
    assert not run.root.exists()


def test_a_run_that_has_served_never_gives_up(start: Callable[..., Run]) -> None:
    """The missing service may return while no one watches."""
    run = start()
    run.wait_until_serving()
    hindrance = run.directory / "decode-cannot-start"
    hindrance.touch()
    (victim,) = run.pids("decode")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: run.text().count("decode-1 ended (status 2: error: ") == 2, explain=run.text)
    hindrance.unlink()
    wait_until(lambda: run.pids("decode"), explain=run.text)
    assert run.end() == 0


def is_replaced(run: Run, role: str, number: int) -> bool:
    """Wait until so many workers have left by themselves."""
    num_left = run.text().count("ended (status 0); it starts again")
    return num_left == number and len(run.pids(role)) == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_was_drained_is_replaced(start: Callable[..., Run], role: str) -> None:
    """The run keeps the number of workers from its flags or from `quire scale`."""
    run = start()
    run.wait_until_serving()
    scale(run, **{f"num_{role}": 2})
    wait_until(lambda: len(run.pids(role)) == 2, explain=run.text)
    for number in (1, 2, 3):
        drained, other = run.pids(role)
        os.kill(drained, signal.SIGUSR1)
        wait_until(partial(is_replaced, run, role, number), explain=run.text)
        assert other in run.pids(role)
    assert run.end() == 0


def test_a_second_signal_ends_the_run_at_once(start: Callable[..., Run]) -> None:
    run = start(decode="stubborn")
    run.wait_until_serving()
    everyone = run.everyone()
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: "once more ends all at once" in run.text(), explain=run.text)
    assert run.end(signal.SIGINT) == 0
    assert "did not end" not in run.text()
    assert not any(map(is_alive, everyone))


def test_workers_are_started_and_the_youngest_leave(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_serving()
    (oldest,) = run.pids("decode")
    up = scale(run, num_decode=3)
    assert (up.num_prefill, up.num_decode) == (1, 3)
    assert (list(up.starting), list(up.leaving)) == (["decode-2", "decode-3"], [])
    wait_until(lambda: len(run.pids("decode")) == 3, explain=run.text)
    down = scale(run, num_decode=1, num_prefill=2)
    assert list(down.starting) == ["prefill-2"]
    assert sorted(down.leaving) == ["decode-2", "decode-3"]
    wait_until(lambda: run.pids("decode") == [oldest], explain=run.text)
    again = scale(run, num_decode=2)
    assert list(again.starting) == ["decode-4"]  # names are not used twice
    wait_until(lambda: len(run.pids("decode")) == len(run.pids("prefill")) == 2, explain=run.text)
    everyone = run.everyone()
    assert run.end() == 0
    assert not any(map(is_alive, everyone))


def test_a_worker_that_does_not_start_is_named_with_its_reason(start: Callable[..., Run]) -> None:
    """`quire scale` shows the reason until the worker starts, and so does the terminal of `quire
    serve`."""
    run = start()
    run.wait_until_serving()
    hindrance = run.directory / "decode-cannot-start"
    hindrance.touch()
    assert scale(run, num_decode=2).failing == {}
    wait_until(
        lambda: scale(run).failing == {"decode-2": "error: there is no memory"}, explain=run.text
    )
    assert "decode-2 ended (status 2: error: there is no memory); it starts again" in run.text()
    hindrance.unlink()
    wait_until(lambda: len(run.pids("decode")) == 2, explain=run.text)
    wait_until(lambda: not scale(run).failing, explain=run.text)
    assert run.end() == 0


def test_workers_of_one_role_never_share_a_port(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role's port belongs to its first worker; a port is free again when its worker has ended."""
    monkeypatch.setenv("QUIRE_DECODE_METRICS_PORT", "9092")
    run = start()
    run.wait_until_serving()

    def ports() -> list[str]:
        environments = []
        for pid in run.pids("decode"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                environments.append(Path(f"/proc/{pid}/environ").read_bytes())
        found = [re.search(rb"QUIRE_DECODE_METRICS_PORT=(\d+)", text) for text in environments]
        return sorted(match[1].decode() for match in found if match)

    assert ports() == ["9092"]
    scale(run, num_decode=3)
    wait_until(lambda: ports() == ["9092", "9093", "9094"], explain=run.text)

    def ports_of_another() -> list[str]:
        scale(run, num_decode=1)
        wait_until(lambda: ports() == ["9092"], explain=run.text)
        scale(run, num_decode=2)
        wait_until(lambda: len(ports()) == 2, explain=run.text)
        return ports()

    # The supervisor may notice the end of a worker after this test does.
    wait_until(ports_of_another, lambda found: found == ["9092", "9093"], explain=run.text)
    assert run.end() == 0


def test_a_host_without_prefill_workers_waits_for_another_one(
    start: Callable[..., Run], short_path: Path
) -> None:
    """Both hosts use one store. Roles may change, but a host has workers."""
    secret = short_path / "secret"
    secret.write_text("a secret that is long enough")
    hosts = ("--redis-url", "redis://127.0.0.1:1", "--service-host", "127.0.0.1", "--mover")
    run = start(flags=("--prefill", "0", "--decode", "2", *hosts, "--secret-file", str(secret)))
    wait_until(
        lambda: "waiting for prefill workers of toys on another host" in run.text(),
        explain=run.text,
    )
    assert len(run.pids("decode")) == 2
    assert not run.pids("prefill")
    assert len(run.pids("mover")) == 1
    (run.directory / "members" / f"prefill-{os.getpid()}").touch()  # of another host
    run.wait_until_serving()
    with pytest.raises(grpc.RpcError, match="a run without workers serves nothing"):
        scale(run, num_decode=0)
    changed = scale(run, num_decode=0, num_prefill=1)
    assert (list(changed.starting), len(changed.leaving)) == (["prefill-1"], 2)
    wait_until(lambda: run.pids("prefill") and not run.pids("decode"), explain=run.text)
    assert run.end() == 0
