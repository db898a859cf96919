"""Checks, before any service starts, whether the services could start with the options of the run.
The services themselves do so, with `--check`."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence

from quire.options.flag import flag_name
from quire.options.gateway import GatewayOptions
from quire.options.worker import WorkerOptions
from quire.supervisor.child import ChildSpec, Stage
from quire.supervisor.errors import ServeError
from quire.supervisor.options import ServeOptions


def specs_to_check(options: ServeOptions, specs: Sequence[ChildSpec]) -> Iterator[ChildSpec]:
    """The first worker of each model, because all workers of a model have the same options, and the
    first gateway. Services for which the user has chosen no options are left out: without options
    only the model's files can be wrong, and they have a check of their own."""
    first: dict[tuple[Stage, str], ChildSpec] = {}
    for spec in specs:
        first.setdefault((spec.stage, spec.model), spec)
    for (stage, model), spec in first.items():
        is_worker = stage is Stage.WORKER and model
        if is_worker and (options.own or options.settings(WorkerOptions)):
            yield spec
        if stage is Stage.GATEWAY and options.settings(GatewayOptions):
            yield spec


def check_service(spec: ChildSpec) -> None:
    """Raises ServeError, with the service's reason, if it could not start. Blocks the thread."""
    done = subprocess.run(
        [*spec.command, "--check"],
        env={**os.environ, **spec.variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"its check ended with {done.returncode}"]
        reason = _with_flags(lines[-1].removeprefix("error: "), spec)
        raise ServeError(f"{spec.name} cannot start: {reason}")


def _with_flags(reason: str, spec: ChildSpec) -> str:
    """A service's reason with the flags of `quire serve` in place of their variables, except for
    those that the user has set."""
    options = GatewayOptions if spec.stage is Stage.GATEWAY else WorkerOptions
    prefix = f"QUIRE_{spec.role or 'gateway'}_".upper()
    flags = {
        prefix + name.upper(): flag_name(name, field)
        for name, field in options.model_fields.items()
        if prefix + name.upper() not in os.environ
    }
    return re.sub(rf"{prefix}\w+", lambda found: flags.get(found[0], found[0]), reason)
