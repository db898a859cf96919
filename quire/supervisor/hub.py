"""Finds a model in the local Hugging Face cache, and downloads what the cache does not have."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.supervisor.errors import ModelNotFound

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.gguf")
"""The files of a model that Quire may read."""

_OTHERS = ("original/*", "onnx/*", "openvino/*", "consolidated*.safetensors")
"""The same weights once more, in formats of other programs."""


def find_snapshot(model_id: str, *, offline: bool) -> Path:
    """The directory of a model in the cache, after a download if the cache does not have all of it.

    The hub is asked only for a model that is missing, and never if `offline`: a start needs no
    network, and serves the same files as the start before. Raises ModelNotFound if the model is not
    in the cache and cannot be downloaded.
    """
    # Imported here because only model ids need it, and the import takes a third of a second.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    files, others = list(_FILES), list(_OTHERS)
    try:
        found = Path(
            snapshot_download(
                model_id, local_files_only=True, allow_patterns=files, ignore_patterns=others
            )
        )
        if _has_weights(found):
            return found
    except HFValidationError as error:
        raise ModelNotFound(f"there is no directory {model_id}, and it is no model id") from error
    except LocalEntryNotFoundError:
        pass
    place = f"the Hugging Face cache ({constants.HF_HUB_CACHE})"
    if offline or constants.HF_HUB_OFFLINE:
        raise ModelNotFound(
            f"there is no directory {model_id}, {place} does not have the model, and nothing is "
            f"downloaded with --offline or HF_HUB_OFFLINE. Download it with: hf download {model_id}"
        )
    print(f"{model_id} is downloaded from {constants.ENDPOINT} into {place}", file=sys.stderr)
    with _reasons(model_id, constants.ENDPOINT):
        return Path(snapshot_download(model_id, allow_patterns=files, ignore_patterns=others))


def _has_weights(snapshot: Path) -> bool:
    """Whether a snapshot has weights; programs that need only a tokenizer leave one without."""
    return any(next(snapshot.glob(name), None) for name in ("*.safetensors", "*.gguf"))


@contextmanager
def _reasons(model_id: str, hub: str) -> Iterator[None]:
    """Says why a download failed, in one line."""
    # HTTPError is the HTTP client's error for a connection that breaks.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HTTPError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{hub} gives {model_id} only to users who have accepted its terms: accept them at "
            f"{hub}/{model_id}, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"there is no directory {model_id}, and {hub} has no such model, or shows it only to "
            "some users (set HF_TOKEN or run `hf auth login`)"
        ) from error
    except (HTTPError, OSError) as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise ModelNotFound(f"{model_id} cannot be downloaded from {hub}: {reason}") from error
