"""The common part of all commands: help, version, completion, colours, exit statuses."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from inspect import signature
from typing import Annotated, Any

import pytest
import typer

from quire.cli import main
from quire.cli.app import app
from quire.cli.flags import with_flags

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.cli", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment
    )


def test_version(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quire {version('quire-serve')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_flag_in_full(command: str, capsys: Any) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: quire {command}")
    parameters = typer.main.get_command(app).get_command(None, command).params  # type: ignore[attr-defined]
    flags = {name for each in parameters for name in each.opts if name.startswith("--")}
    assert not {flag for flag in flags if f"{flag} " not in shown and f"{flag}\n" not in shown}
    assert "…" not in shown
    assert "\033" not in shown


def test_no_command_shows_the_help_and_is_wrong_usage(capsys: Any) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: quire [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["bogus"], "quire: No such command 'bogus' (see `quire --help`)"),
        (["health", "--bogus"], "quire: No such option: --bogus (see `quire health --help`)"),
        (["drain"], "quire: Missing argument 'WORKER' (see `quire drain --help`)"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: list[str], line: str, capsys: Any) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == line + "\n"


def test_a_shell_completes_commands_flags_and_choices() -> None:
    def completed(line: str) -> str:
        words = line.split(" ")
        return run(
            _QUIRE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
        ).stdout

    assert completed("quire sca").split() == ["scale"]
    assert "--pool-memory" in completed("quire serve --pool").split()
    assert completed("quire serve --preemption s").split() == ["swap"]


def imported_by(*words: str) -> set[str]:
    """The modules that a command of `quire` has imported at its end."""
    code = "import sys; from quire.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["serve", "--help"],
        ["down", "--help"],
        ["workers", "--help"],
        ["scale", "--help"],
        ["drain", "--help"],
        ["audit", "--help"],
    ],
    ids=" ".join,
)
def test_a_command_imports_no_large_library_that_it_does_not_use(words: list[str]) -> None:
    large = {"grpc", "google.protobuf", "asyncio", "numpy", "rich", "cryptography", "redis"}
    assert imported_by(*words) & (large | {"huggingface_hub", "tokenizers"}) == set()


def test_a_command_imports_no_other_command() -> None:
    commands = {name for name in imported_by("workers", "--help") if name.startswith("quire.cli.")}
    assert not {name for name in commands if "deployment" in name or "requests" in name}


def test_importing_the_client_library_imports_no_command_line() -> None:
    code = (
        "import sys, quire; print([m for m in ('typer', 'rich', 'quire.cli') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_fields_of_a_dataclass_become_flags() -> None:
    @dataclass(frozen=True)
    class Flags:
        width: Annotated[int, typer.Option(min=1)]
        names: list[str] = field(default_factory=list)

    def command(text: str, flags: Flags, loud: bool = False) -> tuple[str, Flags, bool]:
        return text, flags, loud

    expanded = with_flags(command)
    assert list(signature(expanded).parameters) == ["text", "width", "names", "loud"]
    assert expanded(text="a", width=2, names=["b"], loud=True) == ("a", Flags(2, ["b"]), True)
