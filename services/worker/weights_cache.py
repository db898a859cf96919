"""Checks whether this process can use the directory of packed weights."""

from pathlib import Path
from tempfile import TemporaryFile

from services.runtime.logging import get_logger

log = get_logger(__name__)


def usable_cache(directory: Path | None) -> Path | None:
    """The directory, which is made if it is missing. None, with a warning, if this user has no home
    for it or may not write there: then each worker packs the weights in its own memory."""
    if directory is None:
        return None
    try:
        directory = directory.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return directory
    except (RuntimeError, OSError) as error:
        log.warning("weights_cache_unusable", path=str(directory), reason=str(error))
        return None
