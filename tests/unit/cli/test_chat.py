"""`quire chat`: its requests in each turn, its commands, and Ctrl-C, which ends only an answer."""

import os
import pty
import select
import signal
import subprocess
import sys
from typing import Any

import grpc
import pytest

from quire.cli import main


def say(types: Any, *lines: str, flags: tuple[str, ...] = ()) -> int:
    types("".join(f"{line}\n" for line in lines))
    return main(["chat", *flags])


def sent(gateway: Any) -> list[list[tuple[str, str]]]:
    return [[(m.role, m.content) for m in each.chat.messages] for each in gateway.requests]


def test_each_turn_carries_the_conversation(hello: Any, types: Any, capsys: Any) -> None:
    assert say(types, "Hi", "", "And?", flags=("--system", "Be brief.")) == 0
    assert capsys.readouterr().out == "Hello, world\nHello, world\n"
    first = [("system", "Be brief."), ("user", "Hi")]
    assert sent(hello) == [first, [*first, ("assistant", "Hello, world"), ("user", "And?")]]
    assert len({each.request_id for each in hello.requests}) == 2


def test_reset_and_system(hello: Any, types: Any, capsys: Any) -> None:
    lines = ("Hi", "/system Be kind.", "And?", "/history", "/reset", "New", "/system", "Bare")
    assert say(types, *lines) == 0
    assert [len(each) for each in sent(hello)] == [1, 4, 2, 3]
    assert sent(hello)[2] == [("system", "Be kind."), ("user", "New")]
    assert sent(hello)[3][0] == ("user", "New")
    assert "system: Be kind.\nuser: Hi\nassistant: Hello, world\nuser: And?" in (
        capsys.readouterr().out
    )


def test_the_temperature_suits_a_chat(hello: Any, types: Any) -> None:
    say(types, "a")
    say(types, "a", flags=("--temperature", "1.5"))
    assert [each.sampling.temperature for each in hello.requests] == pytest.approx([0.7, 1.5])


def test_sampling_flags_reach_every_turn(hello: Any, types: Any) -> None:
    say(types, "a", "b", flags=("--temperature", "0", "--max-tokens", "5", "--stop", "x"))
    assert [each.sampling.max_tokens for each in hello.requests] == [5, 5]
    assert [list(each.sampling.stop) for each in hello.requests] == [["x"], ["x"]]


@pytest.mark.parametrize("ending", ["/exit", "/quit"])
def test_exit_and_an_unknown_command(hello: Any, types: Any, capsys: Any, ending: str) -> None:
    assert say(types, "/bogus", ending, "Hi") == 0
    assert capsys.readouterr().err == "quire: no command /bogus; /help lists them\n"
    assert hello.requests == []


def test_in_a_pipe_the_first_error_ends_the_command(hello: Any, types: Any, capsys: Any) -> None:
    hello.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert say(types, "a", "b") == 1
    assert capsys.readouterr().err == "quire: the queue is full\n"
    assert len(hello.requests) == 1


class Terminal:
    """The other end of the chat's terminal."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._rest = b""

    def read_until(self, text: bytes) -> None:
        """Output after `text` is kept for the next call."""
        while text not in self._rest:
            ready, _, _ = select.select([self._file], [], [], 30)
            assert ready, f"{text!r} does not come after {self._rest!r}"
            self._rest += os.read(self._file, 4096)
        self._rest = self._rest.partition(text)[2]

    def write(self, text: bytes) -> None:
        os.write(self._file, text)


def test_on_a_terminal_the_chat_goes_on_after_ctrl_c_and_while_the_server_is_away(
    hello: Any,
) -> None:
    hello.endless = True
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quire.cli", "chat"]
    environment = os.environ | {"TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.read_until(b"> ")
        terminal.write(b"Hi\n")
        terminal.read_until(b"Hello, world")
        os.kill(process.pid, signal.SIGINT)
        assert hello.cancelled.wait(timeout=10)
        terminal.read_until(b"[cancelled]")
        terminal.read_until(b"> ")
        hello.refuse(grpc.StatusCode.UNAVAILABLE, "no worker")
        terminal.write(b"And?\n")
        terminal.read_until(b"quire: no worker")
        terminal.read_until(b"> ")
        hello.is_away = True
        terminal.write(b"And?\n")
        terminal.read_until(b"quire: no server answers at ")
        terminal.read_until(b"> ")
        hello.refusal, hello.is_away = None, False
        terminal.write(b"Still?\n")
        terminal.read_until(b"Hello, world")
        terminal.read_until(b"> ")
        terminal.write(b"\x04")
        assert process.wait(timeout=10) == 0
    os.close(ours)
    assert sent(hello)[-1][:2] == [("user", "Hi"), ("assistant", "Hello, world")]
    assert sent(hello)[-1][2:] == [("user", "Still?")]
    assert sent(hello)[1] == [("user", "Hi"), ("assistant", "Hello, world"), ("user", "And?")]
