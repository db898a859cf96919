"""`quire certs` with names that cannot be a host's."""

import os
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.files import replace_file


@pytest.mark.parametrize("host", ["a b", "https://llm.example.com", "llm.example.com:8000", ""])
def test_name_that_is_no_hosts_is_refused_and_nothing_is_written(
    host: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["certs", str(tmp_path / "tls"), "--host", host]) == 1
    assert f"{host!r} is neither a host's name nor an address" in capsys.readouterr().err
    assert not (tmp_path / "tls").exists()


def test_a_missing_parent_directory_is_not_made(tmp_path: Path, capsys: Any) -> None:
    """A path with a typing error would hide the CA's key."""
    assert main(["certs", str(tmp_path / "etc" / "tls")]) == 1
    assert "tls: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "etc").exists()


@pytest.mark.parametrize("host", ["llm.example.com", "*.example.com", "192.0.2.7", "::1"])
def test_names_and_addresses_are_taken(host: str, tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--host", host]) == 0


def test_a_draft_that_others_may_read_is_not_written_to(tmp_path: Path) -> None:
    """A process that was killed, or another user, may have left a file with the draft's name."""
    draft = tmp_path / f".key.{os.getpid()}"
    draft.write_text("")
    draft.chmod(0o666)
    replace_file(tmp_path / "key", b"secret")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    draft.symlink_to(tmp_path / "elsewhere")
    replace_file(tmp_path / "key", b"secret")
    assert not (tmp_path / "elsewhere").exists()
