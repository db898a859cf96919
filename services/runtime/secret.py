"""The deployment's secret, which all services of a deployment share.

It comes from the settings, or from a file of mode 0600 in the run directory, which the first
service creates. Each use has a key of its own:

prefix hashes        `blockstore.hashing` derives 64 bits from the secret itself
registry entries     `Secret.registry_key` signs them (`blockstore.redis_registry`)
internal RPCs        `Secret.rpc_key` proves the secret (`services.runtime.rpc.proof`)
"""

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from services.runtime.config import ServiceSettings, env_prefix
from services.runtime.errors import StartupError

_NUM_BYTES = 32
MIN_BYTES = 16
"""A reader of the registry can test guesses against a signature, so a short secret is unsafe."""
FILE_NAME = "secret"


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret, and the keys derived from it."""

    root: bytes = field(repr=False)
    """The secret itself, which `repr` does not show."""

    @property
    def registry_key(self) -> bytes:
        return self._key(b"registry")

    @property
    def rpc_key(self) -> bytes:
        return self._key(b"rpc")

    def _key(self, use: bytes) -> bytes:
        return hmac.digest(self.root, b"quire key 1: " + use, "sha256")


def deployment_secret(settings: ServiceSettings) -> Secret:
    """The secret from the settings, or from the run directory.

    Raises StartupError if the secret is set twice, is empty or too short, or if its file is
    unreadable; a file in the run directory must also belong to this user, with mode 0600.
    """
    name = f"{env_prefix(type(settings))}SECRET"
    configured, file = settings.secret, settings.secret_file
    if configured is not None and file is not None:
        raise StartupError(f"{name} and {name}_FILE are both set")
    if configured is not None:
        return _usable(configured.get_secret_value().encode(), name)
    if file is not None:
        # No check of the mode: the operator has chosen this file, and container secrets are often
        # 0444.
        return _usable(_read(file), str(file))
    return _usable(shared_secret(settings.run_dir / FILE_NAME), str(settings.run_dir / FILE_NAME))


def shared_secret(path: Path) -> bytes:
    """The secret in `path`; creates the file if it does not exist. Raises StartupError.

    The secret is written to a private file, which is then linked to `path`: if several services
    start at once, one of them wins, and no reader sees an incomplete secret.
    """
    try:
        if not path.exists():
            draft = _draft(path, secrets.token_hex(_NUM_BYTES).encode())
            try:
                os.link(draft, path)
            except FileExistsError:
                pass  # another service was faster: use its secret
            finally:
                draft.unlink()
    except OSError as error:
        raise StartupError(f"cannot make the secret {path}: {error.strerror}") from error
    return _read_own(path)


def _read_own(path: Path) -> bytes:
    """The content of a secret file. Raises StartupError if the file belongs to another user, or if
    other users may read it."""
    try:
        # The check uses the open descriptor, so it concerns the file that is read. Links are
        # refused: another user could have made one.
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
            "runs the service"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StartupError(f"{path} may be read by others (mode {mode:04o}); it must be 0600")
    return content.strip()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user may read, in place of an older one. Raises StartupError."""
    try:
        _draft(path, content).replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error


def _draft(path: Path, content: bytes) -> Path:
    """Write the content to a new file with a unique name beside `path`; returns that file."""
    usual = os.umask(0o077)  # for all new directories; `mkdir(mode=...)` applies to the last only
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(usual)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    return draft


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise StartupError(f"cannot read the secret {path}: {error.strerror}") from error


def _usable(secret: bytes, where: str) -> Secret:
    if not secret:
        raise StartupError(f"the secret in {where} is empty")
    if len(secret) < MIN_BYTES:
        raise StartupError(
            f"the secret in {where} has {len(secret)} bytes, fewer than {MIN_BYTES}; "
            "`openssl rand -hex 32` makes a good one"
        )
    return Secret(secret)
