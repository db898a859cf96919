"""Finds a model's files (a directory, a GGUF file, by Hugging Face id, or in the package), and
checks whether Quire can serve them."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.files import default_name
from quire.module_command import module_command
from quire.supervisor.errors import ModelNotFound, ModelUnusable
from quire.supervisor.hub import find_snapshot

EMBEDDED = "embedded"
_EMBEDDED_DIRECTORY = Path(str(files("quire") / "embedded"))
_GGUF = b"GGUF"
"""The first bytes of a GGUF file."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's directory, or its GGUF file. `name`: the default name of the model for clients."""

    name: str
    directory: Path


def find_model(name: str, *, offline: bool = False) -> ModelSource:
    """Find a model by directory or GGUF file, by Hugging Face id, or as `embedded`. A model that
    is not in the local Hugging Face cache is downloaded, unless `offline`. Raises ModelNotFound."""
    if name == EMBEDDED:
        return ModelSource("quire-embedded", _embedded())
    directory = Path(name).expanduser()
    if directory.is_dir() or (directory.exists() and _is_gguf(directory)):
        return ModelSource(default_name(directory.resolve()), directory.resolve())
    if directory.exists():
        raise ModelNotFound(
            f"{name} is a file; a model is a directory in Hugging Face format, or a GGUF file"
        )
    if not _may_be_id(name):
        raise ModelNotFound(f"there is no directory {name}")
    return ModelSource(name, find_snapshot(name, offline=offline))


def with_draft_directory(
    speculative_config: Mapping[str, Any], *, offline: bool = False
) -> dict[str, Any]:
    """The setting with the directory of its draft model, if it has one, which is found as a model
    is. Raises ModelNotFound."""
    found = dict(speculative_config)
    if found.get("model") is not None:
        found["model"] = str(find_model(str(found["model"]), offline=offline).directory)
    return found


def check_model(directory: Path) -> None:
    """Raises ModelUnusable if the services would refuse the model's files. Blocks the thread.

    A separate process, without PyTorch, reads the files. The embedded model needs no check.
    """
    if directory == _EMBEDDED_DIRECTORY:
        return
    command = module_command("services.common.checkpoint", str(directory))
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip() or f"the check of its files ended with {done.returncode}"
        raise ModelUnusable(reason.splitlines()[-1].removeprefix("error: "))


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def _may_be_id(name: str) -> bool:
    """Whether `name` has the form `owner/name`. It could also be a relative path; the caller has
    looked for that before."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner not in (".", "..", "~")


def _embedded() -> Path:
    if not (_EMBEDDED_DIRECTORY / "config.json").is_file():
        raise ModelNotFound(f"this installation has no embedded model in {_EMBEDDED_DIRECTORY}")
    return _EMBEDDED_DIRECTORY
