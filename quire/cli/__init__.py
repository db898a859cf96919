"""The `quire` command.

Exit statuses: 0 done; 1 the request failed, or `audit` found a broken law; 2 wrong usage;
3 nobody answers at the address; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from quire.cli import advise, generate, operations, serve
from quire.errors import QuireError, Unreachable
from quire.supervisor import ServeError

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every expected error is one line on stderr."""
    # gRPC's own remarks (a server that said goodbye) are not for the user; services inherit this.
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
        # The reader (`| head`) has gone; keep the interpreter's own flush at exit quiet too.
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
