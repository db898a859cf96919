"""The deployment's secret: every gateway roots its prefix hashes in the same one.

By configuration, else a file of mode 0600 in the run directory, made by whoever comes first.
"""

import os
import secrets
import stat
from pathlib import Path

from services.common.errors import StartupError

_NUM_BYTES = 32
FILE_NAME = "secret"


def deployment_secret(configured: str | None, file: Path | None, run_dir: Path) -> bytes:
    """StartupError: configured twice, or the file is missing, empty, another user's or open to
    others."""
    if configured is not None and file is not None:
        raise StartupError("QUIRE_GATEWAY_SECRET and QUIRE_GATEWAY_SECRET_FILE are both set")
    if configured is not None:
        return _not_empty(configured.encode(), "QUIRE_GATEWAY_SECRET")
    if file is not None:
        # Whoever names a file answers for its mode: secrets of a container are often 0444.
        return _not_empty(_read(file), str(file))
    return _shared(run_dir / FILE_NAME)


def _shared(path: Path) -> bytes:
    """The secret in `path`, made if it is not there. Written whole under a name of our own and then
    linked: of several who come at once one wins, and nobody reads half a secret."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(_NUM_BYTES))
            try:
                os.link(draft, path)
            except FileExistsError:
                pass  # somebody was faster; theirs it is
            finally:
                draft.unlink()
    except OSError as error:
        raise StartupError(f"cannot make the secret {path}: {error.strerror}") from error
    return _not_empty(_read_own(path), str(path))


def _read_own(path: Path) -> bytes:
    """StartupError: another user made the file, and so may know or change it, or may read it."""
    try:
        # What is checked is what is read; not a link, which names a file of whoever made it.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            content = file.read() if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise StartupError(f"cannot read the secret {path}: {error.strerror}") from error
    if content is None:
        raise StartupError(f"{path} is not a file")
    if status.st_uid != os.geteuid():
        raise StartupError(
            f"{path} belongs to user {status.st_uid}; it must belong to user {os.geteuid()}, who "
            "runs the gateway"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StartupError(f"{path} may be read by others (mode {mode:04o}); it must be 0600")
    return content.strip()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise StartupError(f"cannot read the secret {path}: {error.strerror}") from error


def _not_empty(secret: bytes, where: str) -> bytes:
    if not secret:
        raise StartupError(f"the secret in {where} is empty")
    return secret
