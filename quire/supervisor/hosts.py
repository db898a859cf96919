"""Checks a run that is one host of several."""

import os
from collections.abc import Sequence
from importlib.util import find_spec

from quire.supervisor.errors import ServeError
from quire.supervisor.models import ModelOptions
from quire.supervisor.options import ServeOptions

SECRETS = ("QUIRE_GATEWAY_SECRET", "QUIRE_GATEWAY_SECRET_FILE")


def check_hosts(options: ServeOptions, models: Sequence[ModelOptions]) -> None:
    """Raise ServeError if the other hosts cannot do their part."""
    for model in models:
        missing = model.roles_elsewhere
        if len(missing) == 2:
            raise ServeError(f"{model.name} has neither prefill nor decode workers")
        for role in missing:
            _check_part(options, f"{model.name} has no {role} workers on this host, so")
    if options.has_movers:
        _check_movers(options)


def _check_part(options: ServeOptions, why: str) -> None:
    if options.redis_url is None:
        raise ServeError(f"{why} it needs --redis-url, by which other hosts join it")
    if options.service_host is None:
        raise ServeError(f"{why} it needs --service-host, at which other hosts reach it")
    if not options.has_movers:
        cure = "add --mover" if options.mover is None else "leave out --no-mover"
        raise ServeError(f"{why} it needs a mover: {cure}")


def _check_movers(options: ServeOptions) -> None:
    if not options.is_on_gpu and find_spec("nixl_cu12") is None:
        raise ServeError(
            "movers need NIXL: pip install 'quire-serve[mover]'; with --no-mover each host "
            "computes and decodes its requests by itself"
        )
    if options.secret_file is None and not any(map(os.environ.get, SECRETS)):
        raise ServeError(
            "the hosts of a deployment share a secret: write one with `openssl rand -hex 32`, and "
            "name its file on each host with --secret-file"
        )
