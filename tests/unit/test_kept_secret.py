"""Runs that keep blocks in files have the secret of the run before."""

from pathlib import Path

import pytest

from quire.supervisor.errors import ServeError
from quire.supervisor.kept_secret import with_kept_secret
from quire.supervisor.models import ModelOptions
from quire.supervisor.options import ServeOptions


def kept(directory: Path, own: Path | None = None) -> Path | None:
    settings = {"CACHE_DIRECTORY": str(directory)}
    models = ModelOptions("a", Path("a")), ModelOptions("b", Path("b"), settings=settings)
    return with_kept_secret(ServeOptions(secret_file=own), models).secret_file


def test_next_run_has_the_same_secret(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "secret"
    assert kept(path.parent) == path
    secret = path.read_text()
    assert len(secret) == 64
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]
    assert kept(path.parent) == path
    assert path.read_text() == secret


def test_secret_of_the_user_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(tmp_path / "cache", own=tmp_path / "own") == tmp_path / "own"
    monkeypatch.setenv("QUIRE_GATEWAY_SECRET", "s" * 16)
    assert kept(tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()
    monkeypatch.undo()
    with pytest.raises(ServeError, match=r"cache_directory /dev/null/a: Not a directory"):
        kept(Path("/dev/null/a"))
