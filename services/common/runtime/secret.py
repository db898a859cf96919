"""The deployment's secret: all services of a deployment have the same one.

It comes from the configuration, else from a file of mode 0600 in the run directory, which the first
service makes. Each use has a key of its own:

prefix hashes        `blockstore.hashing` derives 64 bits from the secret itself
registry entries     `Secret.registry_key` signs them (`blockstore.redis_registry`)
internal RPCs        `Secret.rpc_key` proves the secret (`services.common.rpc.proof`)
"""

import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import StartupError
from services.common.runtime.config import ServiceSettings, env_prefix

_NUM_BYTES = 32
MIN_BYTES = 16
"""A signature in the registry lets its readers test guesses, so a short secret is none."""
FILE_NAME = "secret"


@dataclass(frozen=True, slots=True)
class Secret:
    """`root` is the secret itself; `repr` and logs never show it."""

    root: bytes = field(repr=False)

    @property
    def registry_key(self) -> bytes:
        return self._key(b"registry")

    @property
    def rpc_key(self) -> bytes:
        return self._key(b"rpc")

    def _key(self, use: bytes) -> bytes:
        return hmac.digest(self.root, b"quire key 1: " + use, "sha256")


def deployment_secret(settings: ServiceSettings) -> Secret:
    """StartupError: the secret is configured twice, or its file is missing, empty or open to
    others."""
    name = f"{env_prefix(type(settings))}SECRET"
    configured, file = settings.secret, settings.secret_file
    if configured is not None and file is not None:
        raise StartupError(f"{name} and {name}_FILE are both set")
    if configured is not None:
        return _usable(configured.get_secret_value().encode(), name)
    if file is not None:
        # The operator who names a file answers for its mode: secrets of a container are often 0444.
        return _usable(_read(file), str(file))
    return _usable(shared_secret(settings.run_dir / FILE_NAME), str(settings.run_dir / FILE_NAME))


def shared_secret(path: Path) -> bytes:
    """The secret in `path`, made if it is not there. StartupError.

    It is written whole under a name of our own and then linked: of several services that start at
    once one wins, and no reader gets half a secret.
    """
    try:
        if not path.exists():
            draft = _draft(path, secrets.token_hex(_NUM_BYTES).encode())
            try:
                os.link(draft, path)
            except FileExistsError:
                pass  # somebody was faster; theirs it is
            finally:
                draft.unlink()
    except OSError as error:
        raise StartupError(f"cannot make the secret {path}: {error.strerror}") from error
    return _read_own(path)


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
            "runs the service"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StartupError(f"{path} may be read by others (mode {mode:04o}); it must be 0600")
    return content.strip()


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that only this user may read. StartupError."""
    try:
        _draft(path, content).replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error


def _draft(path: Path, content: bytes) -> Path:
    """The content whole, under a name beside the path that nobody else has."""
    usual = os.umask(0o077)  # for each of the directories; `mkdir(mode=...)` is for the last one
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
