"""The commands of `quire`, and how a command ends: its exit status, and one line for an error."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire.cli.flags import with_flags
from quire.errors import NotAllowed, QuireError, Unreachable, UnreachableUrl
from quire.supervisor.errors import ServeError

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130
_PANELS_WIDTH = 110

_DEPLOYMENT, _REQUESTS, _STATE = "Deployment", "Requests", "State"

_COMMANDS = {
    "serve": ("deployment.serve:serve", _DEPLOYMENT),
    "down": ("deployment.serve:down", _DEPLOYMENT),
    "scale": ("deployment.scale:scale", _DEPLOYMENT),
    "plan": ("deployment.plan:plan", _DEPLOYMENT),
    "drain": ("deployment.drain:drain", _DEPLOYMENT),
    "upgrade": ("deployment.upgrade:upgrade", _DEPLOYMENT),
    "reload": ("deployment.reload:reload", _DEPLOYMENT),
    "role": ("deployment.role:role", _DEPLOYMENT),
    "certs": ("deployment.certs:certs", _DEPLOYMENT),
    "generate": ("requests.generate:generate", _REQUESTS),
    "batch": ("requests.batch:batch", _REQUESTS),
    "chat": ("requests.chat:chat", _REQUESTS),
    "explain": ("requests.explain:explain", _REQUESTS),
    "health": ("state.health:health", _STATE),
    "top": ("state.top:top", _STATE),
    "models": ("state.lists:models", _STATE),
    "workers": ("state.lists:workers", _STATE),
    "pools": ("state.lists:pools", _STATE),
    "audit": ("state.audit:audit", _STATE),
    "usage": ("state.usage:usage", _STATE),
    "cache": ("state.cache:app", _STATE),
    "lora": ("deployment.lora:app", _DEPLOYMENT),
    "keys": ("deployment.keys:app", _DEPLOYMENT),
    "advise": ("advise:app", _DEPLOYMENT),
}
"""The module and the object of each command, a function or the app of a group, and its panel in the
help."""


@cache
def _load(name: str) -> Any:
    """Return the command of this name. Its module is imported now, so that each command waits only
    for its own imports."""
    place, panel = _COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"quire.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name)(with_flags(function))
    found.rich_markup_mode = app.rich_markup_mode
    command = typer.main.get_command(found)
    command.name = name
    command.rich_help_panel = panel  # type: ignore[attr-defined]
    return command


class _Commands(TyperGroup):
    """The top group. It turns expected errors of all commands into lines and exit statuses."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(_COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        return _load(cmd_name) if cmd_name in _COMMANDS else None

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        with _errors_as_exits():
            return super().invoke(ctx)


def _is_wide_terminal() -> bool:
    """Whether help fits into panels; they cut long flags off on a narrow screen."""
    return sys.stdout.isatty() and shutil.get_terminal_size().columns >= _PANELS_WIDTH


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich" if _is_wide_terminal() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an expected error prints one line to stderr."""
    # gRPC's own log lines (such as a GOAWAY) are not for the user; the services inherit this too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    command = typer.main.get_command(app)
    try:
        with _errors_as_exits():
            status = command.main(args=argv, prog_name="quire", standalone_mode=False)
    except typer.Exit as ended:
        return ended.exit_code
    return status if isinstance(status, int) else 0


@contextmanager
def _errors_as_exits() -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:
        raise typer.Exit(_usage(error)) from error
    except Unreachable as error:
        flag = "--url" if isinstance(error, UnreachableUrl) else "--address"
        hint = f"is `quire serve` running? {flag} names another gateway, --tls-ca one with TLS"
        raise typer.Exit(_fail(f"{error} ({hint})", EXIT_UNREACHABLE)) from error
    except NotAllowed as error:
        text = f"{error} (QUIRE_API_KEY, or --api-key, gives this command its key)"
        raise typer.Exit(_fail(text, EXIT_FAILED)) from error
    except (QuireError, ServeError) as error:
        raise typer.Exit(_fail(str(error), EXIT_FAILED)) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except BrokenPipeError as error:
        # The reader (`| head`) has gone; without this the interpreter's flush at exit fails too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from error


def _usage(error: typer.TyperException) -> int:
    """Say what is wrong with the command line, and which help to read."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "quire"
    message = error.format_message().replace("Value error, ", "").removesuffix(".")
    return _fail(f"{message} (see `{path} --help`)", error.exit_code)


def _fail(message: str, status: int) -> int:
    print(f"quire: {message}", file=sys.stderr)
    return status


def _show_version(is_asked: bool) -> None:
    if is_asked:
        # Imported here because only this option needs it.
        from importlib.metadata import version

        print(f"quire {version('quire-serve')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def quire(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """LLM serving with prefill and decode on separate workers that share one paged KV cache."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
