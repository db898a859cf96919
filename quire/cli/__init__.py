"""The `quire` command.

Exit statuses: 0 success; 1 the command failed, `health` found a service that is not ready, or
`audit` found a broken law; 2 wrong usage; 3 no server answers at the address; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from quire.cli import advise, generate, operations, serve
from quire.errors import QuireError, Unreachable
from quire.supervisor import ServeError

EXIT_FAILED, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an expected error prints one line to stderr."""
    # gRPC's own log lines (such as a GOAWAY) are not for the user; the services inherit this too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except Unreachable as error:
        hint = "is `quire serve` running? --address names another gateway, see --help"
        return _fail(f"{error} ({hint})", EXIT_UNREACHABLE)
    except (QuireError, ServeError) as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; without this the interpreter's flush at exit fails too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="quire",
        description="LLM serving with prefill and decode on separate workers that share one paged "
        "KV cache.",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (serve, generate, operations, advise):
        module.add_commands(commands)
    return top


def _fail(message: str, status: int) -> int:
    print(f"quire: {message}", file=sys.stderr)
    return status
