"""A Hugging Face cache of a test."""

from pathlib import Path

import pytest
from huggingface_hub import constants


def use_empty_cache(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """The library reads its settings once, when it is imported; it may not ask the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return path


def cached(cache: Path, model_id: str) -> Path:
    """Add a model with empty weights. Returns its directory."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abcd")
    return snapshot
