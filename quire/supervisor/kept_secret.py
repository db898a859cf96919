"""The secret of runs that keep blocks in files. The blocks' hashes depend on the secret, so a run
finds the files of the run before only with the same one."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from quire.supervisor.errors import ServeError
from quire.supervisor.hosts import SECRETS
from quire.supervisor.models import ModelOptions
from quire.supervisor.options import ServeOptions


def with_kept_secret(options: ServeOptions, models: Sequence[ModelOptions]) -> ServeOptions:
    """The options with the secret of the cache directory, if there is such a directory and the user
    names no secret. Raises ServeError."""
    directory = next(filter(None, (model.settings.get("CACHE_DIRECTORY") for model in models)), "")
    if not directory or options.secret_file or any(map(os.environ.get, SECRETS)):
        return options
    path = Path(directory).expanduser() / "secret"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.touch(0o600, exist_ok=False)
            path.write_text(token_hex(32))
    except OSError as error:
        raise ServeError(f"cache_directory {directory}: {error.strerror}") from error
    return replace(options, secret_file=path)
