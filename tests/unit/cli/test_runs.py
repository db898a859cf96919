"""Operations find a run of this host by the sockets in its directory."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.cli.runs import run_address
from quire.errors import Unreachable
from quire.sockets import (
    living_sockets,
    operations_socket,
    remove_dead_sockets,
    socket_of,
    starting_socket,
)
from quire.supervisor.errors import ServeError


class Runs:
    """Directories of runs, and gateways that only listen."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self._stack = stack

    def add(self, name: str, port: int = 1) -> Path:
        run = self.root / name
        run.mkdir(exist_ok=True)
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(operations_socket(run, "here", port)))
        listener.listen()
        return run

    def add_dead(self, name: str) -> Path:
        with socket.socket(socket.AF_UNIX) as listener:
            (self.root / name).mkdir(exist_ok=True)
            path = operations_socket(self.root / name, "another container", 1)
            listener.bind(str(path))
        return path


def address(run: Path) -> str:
    return f"unix:{operations_socket(run, 'here', 1)}"


@pytest.fixture
def runs(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    for name in ("QUIRE_ADDRESS", "QUIRE_OPERATIONS_ADDRESS", "QUIRE_RUN"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        yield Runs(short_path, stack)


def test_the_only_run_needs_no_name(runs: Runs) -> None:
    run = runs.add("50051-aaaaaaaa")
    (runs.root / "50052-bbbbbbbb").mkdir()
    runs.add_dead("50053-cccccccc")
    assert run_address(None, runs.root) == address(run)


def test_several_runs_are_told_and_one_is_chosen_by_port_or_directory(runs: Runs) -> None:
    one, two = runs.add("50051-aaaaaaaa"), runs.add("5005-bbbbbbbb")
    with pytest.raises(ServeError) as told:
        run_address(None, runs.root)
    assert str(told.value) == (
        f"several runs of this user exist ({two}, {one}): choose one with --run PORT or --run "
        "DIRECTORY"
    )
    assert run_address("5005", runs.root) == address(two)
    assert run_address(str(one), runs.root) == address(one)
    with pytest.raises(ServeError, match="no run is on port 50052"):
        run_address("50052", runs.root)


def test_operations_without_a_server_are_an_error(runs: Runs) -> None:
    for root in (runs.root, runs.root / "gone"):
        with pytest.raises(Unreachable, match="no run of this user serves operations"):
            run_address(None, root)
    with pytest.raises(Unreachable, match="no gateway serves operations in /gone"):
        run_address("/gone", runs.root)


def test_a_named_gateway_is_never_replaced_by_another_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.add("50051-aaaaaaaa")
    monkeypatch.setenv("QUIRE_ADDRESS", "elsewhere:50051")
    with pytest.raises(ServeError, match="QUIRE_ADDRESS names elsewhere:50051"):
        run_address(None, runs.root)
    assert run_address("50051", runs.root) == address(run)


def test_sockets_of_dead_gateways_are_removed_once_they_are_old(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, dead = runs.add("50051-aaaaaaaa"), runs.add_dead("50051-aaaaaaaa")
    remove_dead_sockets(run)
    assert dead.exists()
    made_at = dead.stat().st_mtime
    monkeypatch.setattr("quire.sockets.time.time", lambda: made_at + 11)
    remove_dead_sockets(run)
    assert not dead.exists()
    assert living_sockets(run) == [operations_socket(run, "here", 1)]


def test_a_gateway_has_the_same_path_again_unless_another_one_listens_there(runs: Runs) -> None:
    run = runs.add("50051-aaaaaaaa")
    usual = operations_socket(run, "here", 1)
    own = starting_socket(run, "here", 1)
    assert own != usual
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(own))
        listener.listen()
        assert set(living_sockets(run)) == {usual, own}
    dead = runs.add_dead("50051-aaaaaaaa")
    assert starting_socket(run, "another container", 1) == dead
    assert starting_socket(run, "here", 2) == operations_socket(run, "here", 2)


def test_the_socket_of_a_gateway_is_found_by_its_process(runs: Runs) -> None:
    run = runs.add("50051-aaaaaaaa")
    runs.add_dead("50051-aaaaaaaa")
    assert socket_of(run, os.getpid()) == operations_socket(run, "here", 1)
    assert socket_of(run, os.getppid()) is None
    assert socket_of(run, None) is None


def test_commands_take_the_run_of_the_environment(
    runs: Runs, gateway: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("QUIRE_OPERATIONS_ADDRESS")
    monkeypatch.setenv("QUIRE_RUN", "/gone")
    assert main(["workers"]) == 3
    assert "no gateway serves operations in /gone" in capsys.readouterr().err
    assert main(["workers", "--address", gateway.address]) == 0


def test_all_gateways_of_a_run_are_found(runs: Runs) -> None:
    run = runs.add("50051-aaaaaaaa")
    runs.add_dead("50051-aaaaaaaa")
    runs.add("50051-aaaaaaaa", port=2)
    other = operations_socket(run, "here", 2)
    assert run_address(None, runs.root) == f"{address(run)},unix:{other}"
