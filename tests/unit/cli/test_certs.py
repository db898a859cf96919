"""`quire certs` with names that cannot be a host's."""

from pathlib import Path
from typing import Any

import pytest

from quire.cli import main


@pytest.mark.parametrize("host", ["a b", "https://llm.example.com", "llm.example.com:8000", ""])
def test_name_that_is_no_hosts_is_refused_and_nothing_is_written(
    host: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["certs", str(tmp_path / "tls"), "--host", host]) == 1
    assert f"{host!r} is neither a host's name nor an address" in capsys.readouterr().err
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize("host", ["llm.example.com", "*.example.com", "192.0.2.7", "::1"])
def test_names_and_addresses_are_taken(host: str, tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--host", host]) == 0
