"""Finds the address at which a run of this host serves operations: a socket in the run's
directory."""

import os
from pathlib import Path

from quire.errors import Unreachable
from quire.sockets import living_sockets
from quire.supervisor.errors import ServeError
from quire.supervisor.run_directory import run_paths


def run_address(name: str | None, runs: Path) -> str:
    """Return the operations addresses of a run's gateways, separated by commas, the oldest first.
    `name` is the run's gRPC port or its directory, or None for the only run.

    Raises ServeError unless exactly one run matches, or if the choice is not clear, and Unreachable
    if no gateway listens for operations.
    """
    if name is not None and not name.isdecimal():
        return _address_in(Path(name))
    _require_no_other_gateway(name)
    living = [path for path in run_paths(runs) if living_sockets(path)]
    chosen = [path for path in living if name is None or path.name.startswith(f"{name}-")]
    if len(chosen) == 1:
        return _address_in(chosen[0])
    if not living:
        raise Unreachable(f"no run of this user serves operations in {runs}", "unreachable")
    problem = "several runs of this user exist" if name is None else f"no run is on port {name}"
    found = ", ".join(str(path) for path in living)
    raise ServeError(f"{problem} ({found}): choose one with --run PORT or --run DIRECTORY")


def _require_no_other_gateway(name: str | None) -> None:
    """Raise ServeError if no run is named but QUIRE_ADDRESS is set: that gateway may belong to
    another deployment than the run on this host."""
    gateway = os.environ.get("QUIRE_ADDRESS")
    if gateway and name is None:
        raise ServeError(
            f"QUIRE_ADDRESS names {gateway}, where a gateway serves its clients and no operations: "
            "choose a run of this host with --run PORT, or set QUIRE_OPERATIONS_ADDRESS"
        )


def _address_in(run: Path) -> str:
    sockets = living_sockets(run)
    if not sockets:
        raise Unreachable(f"no gateway serves operations in {run}", "unreachable")
    return ",".join(f"unix:{path}" for path in sockets)
