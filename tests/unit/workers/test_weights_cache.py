"""A worker whose user has no home, or no right to write its cache, runs without the cache."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.worker.config import WorkerSettings
from services.worker.weights_cache import usable_cache


def test_a_user_without_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with `--user 54321`."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    settings = WorkerSettings.model_validate({"model": "/model"})
    with capture_logs() as logs:
        assert usable_cache(settings.weights_cache) is None
    assert [(line["event"], line["path"]) for line in logs] == [
        ("weights_cache_unusable", "~/.cache/quire")
    ]


def test_a_directory_that_cannot_be_written_is_no_cache() -> None:
    with capture_logs() as logs:
        assert usable_cache(Path("/sys/quire")) is None
    assert logs[0]["event"] == "weights_cache_unusable"


def test_a_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    assert usable_cache(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not list((tmp_path / "a" / "b").iterdir())
    assert usable_cache(None) is None
