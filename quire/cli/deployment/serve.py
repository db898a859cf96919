"""`quire serve` and `quire down`: start and end a deployment, or its part on this host."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from quire.cli.flags import RunName
from quire.supervisor.options import ServeOptions
from quire.supervisor.run_directory import RUNS, free_port, stop_run

RunRoot = Annotated[
    Path, Option(metavar="DIR", help="a tmpfs for the directories and pools of runs")
]


def serve(
    options: ServeOptions,
    run_root: RunRoot = RUNS,
    handover: Annotated[
        int | None,
        Option(metavar="FD", help="for `quire upgrade`, which starts this command anew with it"),
    ] = None,
) -> None:
    """Serve models on this host, in the foreground."""
    if options.cpus is not None and options.threads is not None:
        raise BadParameter("--cpus and --threads exclude each other")
    # Imported here and not above, because the help needs neither gRPC nor asyncio.
    from quire.supervisor import supervisor
    from quire.supervisor.handover import receive
    from quire.supervisor.hosts import check_hosts
    from quire.supervisor.kept_secret import with_kept_secret
    from quire.supervisor.models import find_models

    received = None if handover is None else receive(handover)
    if received is not None:
        options = replace(options, grpc_port=received.grpc_port, http_port=received.http_port)
    models = find_models(options)
    check_hosts(options, models)
    options = with_kept_secret(options, models)
    supervisor.serve(resolved(options), models, run_root, received)


def down(run: RunName = None, run_root: RunRoot = RUNS) -> None:
    """End a `quire serve` of this user."""
    ended = stop_run(run_root, run)
    print(f"the run on port {ended.grpc_port} (pid {ended.pid}) has ended")


def resolved(options: ServeOptions) -> ServeOptions:
    """The options with ports in place of 0."""
    grpc_port = options.grpc_port or free_port(options.host)
    http_port = options.http_port or free_port(options.host)
    if grpc_port == http_port and not (options.grpc_port and options.http_port):
        return resolved(options)  # the free port was the other one's
    return replace(options, grpc_port=grpc_port, http_port=http_port)
