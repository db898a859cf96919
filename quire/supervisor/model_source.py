"""Where a model's files are: a directory, the local Hugging Face cache, or the embedded model; and
whether they can be served."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from quire.supervisor.errors import ModelNotFound, ModelUnusable

EMBEDDED = "embedded"
_EMBEDDED_DIRECTORY = Path(str(files("quire") / "embedded"))
_GGUF = b"GGUF"
"""How such a file begins."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is what clients call the model."""

    name: str
    directory: Path


def find_model(name: str) -> ModelSource:
    """A model given by directory, by Hugging Face id, or as `embedded`. ModelNotFound."""
    if name == EMBEDDED:
        return ModelSource("quire-embedded", _embedded())
    directory = Path(name).expanduser()
    if directory.is_dir():
        return ModelSource(directory.resolve().name, directory.resolve())
    if directory.exists():
        kind = "a GGUF file" if _is_gguf(directory) else "a file"
        raise ModelNotFound(f"{name} is {kind}; --model takes a directory in Hugging Face format")
    if not _may_be_id(name):
        raise ModelNotFound(f"there is no directory {name}")
    return ModelSource(name, _cached(name))


def check_model(source: ModelSource) -> None:
    """ModelUnusable: the services would refuse its files. They are read in a process of its own,
    which imports no PyTorch; the embedded model's are known."""
    if source.directory == _EMBEDDED_DIRECTORY:
        return
    # -P: a directory `services` where the user happens to be must not hide ours.
    command = [sys.executable, "-P", "-m", "services.common.checkpoint", str(source.directory)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or f"the check of its files ended with {done.returncode}"
        raise ModelUnusable(said.splitlines()[-1].removeprefix("error: "))


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def _may_be_id(name: str) -> bool:
    """`owner/name`, which is also a relative path: it is looked up as a path first."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner not in (".", "..", "~")


def _embedded() -> Path:
    if not (_EMBEDDED_DIRECTORY / "config.json").is_file():
        raise ModelNotFound(f"this installation has no embedded model in {_EMBEDDED_DIRECTORY}")
    return _EMBEDDED_DIRECTORY


def _cached(model_id: str) -> Path:
    # Imported here: only an id needs it, and it takes a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, local_files_only=True))
    except HFValidationError as error:
        raise ModelNotFound(f"there is no directory {model_id}, and it is no model id") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"there is no directory {model_id}, and the Hugging Face cache ({HF_HUB_CACHE}) does "
            f"not have it; download it with: hf download {model_id}"
        ) from error
