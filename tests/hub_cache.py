"""A Hugging Face cache of a test."""

from pathlib import Path

import pytest
from huggingface_hub import constants


def use_empty_cache(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """The library reads the path of its cache once, when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    return path


def cached(cache: Path, model_id: str) -> Path:
    """Add an empty model. Returns its directory."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abcd")
    return snapshot
