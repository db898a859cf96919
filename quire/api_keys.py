"""API keys: the format of the key file, which `quire keys` writes and gateways read.

    {"keys": [{"name": "alice", "tenant": "acme", "hash": "sha256:9f86...", "max_concurrency": 8}]}

A key has 256 random bits, so a single SHA-256 protects it: a slow hash would add nothing, because
nobody can test guesses of such a key.
"""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quire.errors import QuireError
from quire.files import replace_file

PREFIX = "qk-"
MIN_CHARS = 32
"""Fewer characters cannot hold the 128 random bits that a key needs, in hexadecimal digits."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Positive = Annotated[int, Field(ge=1)]
Role = Literal["user", "operator"]


class KeyFileError(QuireError):
    """The key file cannot be read or written, or is not valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "key_file")


class ApiKey(BaseModel):
    """One key and what its owner may do. None for no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    name: Name
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    tenant: Name = ""
    """Keys of one tenant share cached prefixes; tenants never do. Default: the key's name."""
    role: Role = "user"
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Tokens of prompts and of answers."""
    max_concurrency: Positive | None = None
    """Sequences that run or wait at a time: a request with n = 4 counts as 4."""
    max_sequences: Positive = 8
    """Limit of n and of the width of a beam search."""
    models: tuple[str, ...] | None = None
    """The models that this key sees; None for all."""
    retained_blocks: Annotated[int, Field(ge=0)] | None = None
    """Blocks of each pool that the key's tenant may retain with this key."""
    priority_ceiling: int = 0
    """The most urgent priority that a request may ask for; a lower number is more urgent."""

    @model_validator(mode="before")
    @classmethod
    def _own_tenant(cls, fields: object) -> object:
        if isinstance(fields, dict) and not fields.get("tenant"):
            return {**fields, "tenant": fields.get("name")}
        return fields


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[ApiKey, ...]


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """The hash by which the file names a key."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def make_key(fields: dict[str, Any]) -> ApiKey:
    """A key with these fields. KeyFileError names the first mistake."""
    try:
        return ApiKey.model_validate(fields)
    except ValidationError as error:
        raise KeyFileError(_problem(error)) from None


def _problem(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    path = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in first["loc"])
    return ": ".join(filter(None, (path.lstrip("."), first["msg"])))


def _check_unique(keys: Sequence[ApiKey], where: Path) -> None:
    """Raises KeyFileError if two keys have one name, or one hash."""
    names, by_hash = set(), dict[str, str]()
    for key in keys:
        if key.name in names:
            raise KeyFileError(f"{where}: two keys are named {key.name}")
        if (other := by_hash.setdefault(key.hash, key.name)) != key.name:
            raise KeyFileError(f"{where}: {other} and {key.name} have the same hash")
        names.add(key.name)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. KeyFileError names the first mistake."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise KeyFileError(f"cannot read the API keys in {path}: {reason}") from error
    try:
        keys = _KeyFile.model_validate_json(text).keys
    except ValidationError as error:
        raise KeyFileError(f"{path}: {_problem(error)}") from None
    _check_unique(keys, path)
    return keys


@contextmanager
def changed_keys(path: Path) -> Iterator[list[ApiKey]]:
    """Yields the keys of the file, which may not exist yet, and writes them back in one step when
    the block ends. Other processes that change the file wait. Raises KeyFileError."""
    try:
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(read_keys(path)) if path.exists() else []
        yield keys
        _check_unique(keys, path)
        _write(path, _KeyFile(keys=tuple(keys)))
    finally:
        os.close(lock)


def _write(path: Path, content: _KeyFile) -> None:
    text = content.model_dump_json(indent=2, exclude_defaults=True) + "\n"
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from error
