"""Run directories have one owner each, and dead owners leave nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quire.supervisor.errors import ServeError
from quire.supervisor.run_directory import RunRecord, claim, free_port, stop_run


def record(grpc_port: int | None = None) -> RunRecord:
    grpc_port = grpc_port or free_port("127.0.0.1")
    return RunRecord(os.getpid(), "127.0.0.1", grpc_port, free_port("127.0.0.1"))


def test_a_run_has_a_private_directory_that_says_who_it_is(short_path: Path) -> None:
    mine = record()
    run = claim(short_path / "runs", mine)
    assert run.path.name.startswith(f"{mine.grpc_port}-")
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert json.loads((run.path / "run.json").read_text())["pid"] == os.getpid()
    run.remove()


def test_the_last_run_takes_the_root_with_it(short_path: Path) -> None:
    runs = short_path / "runs"
    first, second = claim(runs, record()), claim(runs, record())
    first.remove()
    assert [path.name for path in runs.iterdir()] == [second.path.name]
    second.remove()
    assert not runs.exists()


def test_leftovers_of_a_dead_run_are_removed_and_a_live_run_is_kept(short_path: Path) -> None:
    runs = short_path / "runs"
    alive = claim(runs, record())
    dead = runs / "50051-deadbeef"
    (dead / "pools" / "p-1").mkdir(parents=True)
    (dead / "pools" / "p-1" / "kv").write_bytes(b"old")
    claim(runs, record())
    assert alive.path.exists()
    assert not dead.exists()


def test_other_directories_of_the_root_are_kept(short_path: Path) -> None:
    """A user may give a directory that has other files."""
    runs = short_path / "runs"
    runs.mkdir(mode=0o700)
    others = [runs / name for name in ("venv", "50051-notes", ".50051-deadbeef")]
    for other in others:
        (other / "files").mkdir(parents=True)
    claim(runs, record()).remove()
    assert all((other / "files").is_dir() for other in others)


def test_a_second_run_on_the_same_port_is_refused(short_path: Path) -> None:
    mine = record()
    claim(short_path / "runs", mine)
    with pytest.raises(ServeError, match=rf"`quire serve` with pid {os.getpid()} has port"):
        claim(short_path / "runs", record(mine.grpc_port), timeout_s=0)


def test_every_gateway_of_a_run_has_its_ports(short_path: Path) -> None:
    two = RunRecord(os.getpid(), "127.0.0.1", 7000, 8000, num_gateways=2)
    assert two.ports == (7000, 8000, 7001, 8001)
    for ports, shared in [((7001, 9000), True), ((9000, 8001), True), ((7002, 8002), False)]:
        assert RunRecord(1, "127.0.0.1", *ports).shares_port_with(two) is shared
    overlapping = RunRecord(os.getpid(), "127.0.0.1", 7000, 7001, num_gateways=2)
    with pytest.raises(ServeError, match="2 gateways would share ports"):
        claim(short_path / "runs", overlapping, timeout_s=0)
    same = RunRecord(os.getpid(), "127.0.0.1", 7000, 7000)
    with pytest.raises(ServeError, match="gRPC and HTTP would share port 7000: choose another"):
        claim(short_path / "runs", same, timeout_s=0)


def test_a_port_that_another_program_has_is_named(short_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=rf"another program listens on 127.0.0.1:{port}"):
            claim(short_path / "runs", record(port), timeout_s=0)


@pytest.mark.parametrize("host", ["::", "::1"])
def test_a_run_may_listen_on_ipv6(short_path: Path, host: str) -> None:
    """A port that another program has is noticed in both families."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=rf"another program listens on \[{host}\]:{port}"):
            claim(short_path / "runs", replace(record(port), host=host), timeout_s=0)
    claim(short_path / "runs", replace(record(port), host=host)).remove()


def test_a_root_too_long_for_sockets_is_refused(short_path: Path) -> None:
    with pytest.raises(ServeError, match="choose a shorter --run-root"):
        claim(short_path / ("long" * 20), record())


def test_root_that_cannot_be_made_is_named(short_path: Path) -> None:
    (short_path / "file").touch()
    for root in (short_path / "file", short_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ServeError, match=f"cannot make the directory {root}: "):
            claim(root, record())


def test_root_whose_parent_is_missing_is_refused_and_makes_nothing(short_path: Path) -> None:
    root = short_path / "typo" / "runs"
    with pytest.raises(ServeError, match=f"there is no {root.parent}"):
        claim(root, record())
    assert not root.parent.exists()


def test_a_new_run_waits_for_the_old_one_to_end(short_path: Path) -> None:
    """Its lock drops with its process, here by kill -9."""
    runs, mine = short_path / "runs", record()
    old = _run_elsewhere(runs, mine)
    old.kill()
    old.wait()
    run = claim(runs, mine)
    assert [path.name for path in runs.iterdir()] == [run.path.name]


def test_stop_run_ends_the_run_on_that_port(short_path: Path) -> None:
    runs, mine = short_path / "runs", record()
    other = claim(runs, record())
    with _run_elsewhere(runs, mine) as process:
        assert stop_run(runs, str(mine.grpc_port)).pid == process.pid
        assert process.wait(timeout=5) == -signal.SIGTERM
    assert other.path.exists()


def test_stop_run_ends_the_run_in_a_directory_of_any_root(short_path: Path) -> None:
    """As --run of the other commands names it, and QUIRE_RUN."""
    with _run_elsewhere(short_path / "others", record()) as process:
        (directory,) = (short_path / "others").iterdir()
        assert stop_run(short_path / "runs", str(directory)).pid == process.pid


def test_the_only_run_needs_no_port(short_path: Path) -> None:
    with _run_elsewhere(short_path / "runs", record()) as process:
        assert stop_run(short_path / "runs", None).pid == process.pid


def test_one_of_several_runs_must_be_named(short_path: Path) -> None:
    ports = sorted(claim(short_path / "runs", record()).path.name[:-9] for _ in range(2))
    with pytest.raises(ServeError, match=rf"ports of runs: {ports[0]}, {ports[1]}$"):
        stop_run(short_path / "runs", None)


def test_stopping_without_a_run_is_an_error(short_path: Path) -> None:
    with pytest.raises(ServeError, match=r"not a run 50051 to end: .*; ports of runs: none"):
        stop_run(short_path / "runs", "50051")
    assert not (short_path / "runs").exists()


def test_a_root_that_others_may_write_is_refused(short_path: Path) -> None:
    runs = short_path / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    with pytest.raises(ServeError, match="open to others"):
        claim(runs, record())


def _run_elsewhere(runs: Path, mine: RunRecord) -> subprocess.Popen[bytes]:
    """A process that has claimed a run, and waits."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from quire.supervisor.run_directory import RunRecord, claim\n"
        "runs, host, grpc_port, http_port = sys.argv[1:]\n"
        "claim(Path(runs), RunRecord(os.getpid(), host, int(grpc_port), int(http_port)))\n"
        "print('claimed', flush=True)\n"
        "signal.pause()\n"
    )
    arguments = [str(runs), mine.host, str(mine.grpc_port), str(mine.http_port)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"claimed\n"
    return process
