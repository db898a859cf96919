"""`quire serve` as a process, with a real Valkey and toy services: it starts, repairs and ends
them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.supervisor.run_directory import free_port
from quire.v1.supervisor_pb2 import ScaleRequest, ScaleResponse, UpgradeRequest, UpgradeResponse
from quire.v1.supervisor_pb2_grpc import SupervisorStub
from tests.waiting import wait_until

TOYS = Path(__file__).parent / "toys"
LIMIT_S = 20.0


class Run:
    """A `quire serve` with toy services, and its own root for run directories."""

    def __init__(
        self,
        root: Path,
        *,
        grpc_port: int | None = None,
        flags: Sequence[str] = (),
        model: Path = TOYS,
        **toys: str,
    ) -> None:
        self.root = root
        self.grpc_port = grpc_port or free_port("127.0.0.1")
        self.output = root.parent / f"output-{self.grpc_port}-{time.monotonic_ns()}"
        environment = {**os.environ, "PYTHONPATH": str(TOYS), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {f"TOY_{role.upper()}": behaviour for role, behaviour in toys.items()}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "quire.cli", "serve", "--model", str(model)),
                    *("--run-root", str(root), "--grpc-port", str(self.grpc_port)),
                    *("--http-port", "0", *flags),
                ],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def directory(self) -> Path:
        (path,) = self.root.glob(f"{self.grpc_port}-*")
        return path

    def text(self) -> str:
        return self.output.read_text()

    def pids(self, role: str) -> list[int]:
        """Pids of running members of a role; `redis` is found by its socket."""
        if role == "redis":
            return [pid for pid in _pids() if str(self.directory / "redis.sock") in _command(pid)]
        entered = self.directory.glob(f"members/{role}-*")
        pids = [int(path.name.rsplit("-", 1)[1]) for path in entered]
        return [pid for pid in pids if _is_alive(pid)]

    def everyone(self) -> list[int]:
        roles = ("redis", "block_manager", "prefill", "decode", "gateway")
        return [pid for role in roles for pid in self.pids(role)]

    def wait_until_serving(self) -> None:
        wait_until(lambda: "Quire is serving" in self.text(), explain=self.text)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=LIMIT_S)


@pytest.fixture
def start(short_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**options: object) -> Run:
        runs.append(Run(short_path / "runs", **options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return _command(pid) != ""


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
    assert not any(map(_is_alive, everyone))
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
    wait_until(lambda: not any(map(_is_alive, everyone)))
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
    assert not any(map(_is_alive, everyone))


def scale(run: Run, **numbers: Any) -> ScaleResponse:
    with grpc.insecure_channel(f"unix:{run.directory}/supervisor.sock") as channel:
        return SupervisorStub(channel).Scale(ScaleRequest(**numbers), timeout=LIMIT_S)


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
    assert not any(map(_is_alive, everyone))


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
    assert not any(map(_is_alive, everyone))
    assert not run.root.exists()


def test_the_next_supervisor_leaves_no_orphans_when_it_is_killed(
    start: Callable[..., Run],
) -> None:
    run = with_another_supervisor(start)
    everyone = run.everyone()
    assert len(everyone) == 5
    run.end(signal.SIGKILL)
    wait_until(lambda: not any(map(_is_alive, everyone)))


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
    assert not any(map(_is_alive, everyone))
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
