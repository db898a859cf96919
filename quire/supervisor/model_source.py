"""Where a model's files are: a directory, the local Hugging Face cache, or the embedded model."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from quire.supervisor.errors import ModelNotFound

EMBEDDED = "embedded"


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
        return _given(directory.resolve())
    if directory.exists():
        raise ModelNotFound(f"{name} is a file; --model takes a directory in Hugging Face format")
    if not _may_be_id(name):
        raise ModelNotFound(f"there is no directory {name}")
    return ModelSource(name, _cached(name))


def _given(directory: Path) -> ModelSource:
    """A wrong directory is told at once, not when a worker has loaded its libraries."""
    if not (directory / "config.json").is_file():
        raise ModelNotFound(
            f"{directory} has no config.json: it is no model in Hugging Face format"
        )
    return ModelSource(directory.name, directory)


def _may_be_id(name: str) -> bool:
    """`owner/name`, which is also a relative path: it is looked up as a path first."""
    owner, slash, rest = name.partition("/")
    return bool(slash and owner and rest) and "/" not in rest and owner not in (".", "..", "~")


def _embedded() -> Path:
    directory = Path(str(files("quire") / "embedded"))
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"this installation of Quire has no embedded model in {directory}")
    return directory


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
