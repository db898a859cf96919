"""`quire keys` and `quire certs`, and the flags with which commands reach a protected gateway."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire import BadTls, NotAllowed, Tls
from quire.api_keys import hash_key, read_keys
from quire.cli import main
from quire.client import Client


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path, capsys: Any) -> None:
    file = str(tmp_path / "keys.json")
    assert main(["keys", "create", "alice", "--file", file, "--tenant", "acme"]) == 0
    shown = capsys.readouterr()
    assert f"alice has been added to {file}" in shown.err
    key = shown.out.strip()
    flags = ["--role", "operator", "--max-concurrency", "5", "--model", "m"]
    assert main(["keys", "create", "bob", "--file", file, *flags]) == 0
    assert key not in Path(file).read_text()
    assert Path(file).stat().st_mode & 0o777 == 0o600
    alice, bob = read_keys(Path(file))
    assert (alice.hash, alice.tenant, alice.max_sequences) == (hash_key(key), "acme", 8)
    assert (bob.role, bob.max_concurrency) == ("operator", 5)
    assert bob.models == ("m",)
    capsys.readouterr()
    assert main(["keys", "list", "--file", file]) == 0
    assert "sha256" not in capsys.readouterr().out
    assert main(["keys", "list", "--file", file, "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["alice", "bob"]
    assert main(["keys", "revoke", "alice", "--file", file]) == 0
    assert [each.name for each in read_keys(Path(file))] == ["bob"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["create", "bob"], "has a key bob already"),
        (["create", "a b"], "name: String should match pattern"),
        (["revoke", "carol"], "has no key carol"),
    ],
)
def test_mistakes_change_nothing(
    tmp_path: Path, capsys: Any, command: list[str], problem: str
) -> None:
    file = tmp_path / "keys.json"
    main(["keys", "create", "bob", "--file", str(file)])
    before = file.read_text()
    assert main(["keys", *command, "--file", str(file)]) == 1
    assert problem in capsys.readouterr().err
    assert file.read_text() == before
    file.write_text("{")
    assert main(["keys", "create", "dora", "--file", str(file)]) == 1
    assert file.read_text() == "{"


def test_file_in_a_missing_directory_is_refused_and_makes_nothing(
    tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "typo" / "keys.json"
    assert main(["keys", "create", "bob", "--file", str(file)]) == 1
    assert f"cannot write {file}: {file.parent}: No such" in capsys.readouterr().err
    assert not file.parent.exists()


def test_the_hash_of_a_key_of_ones_own(types: Any, capsys: Any) -> None:
    own = "0123456789abcdef" * 2
    types(own + "\n")
    assert main(["keys", "hash", "--file", "-"]) == 0
    assert capsys.readouterr().out.strip() == hash_key(own)
    types("short")
    assert main(["keys", "hash", "--file", "-"]) == 2
    assert "this one has 5" in capsys.readouterr().err


def test_certificates_are_written_and_a_strange_name_is_refused(
    tmp_path: Path, capsys: Any
) -> None:
    assert main(["certs", str(tmp_path), "--host", "llm.example.com", "--client", "alice"]) == 0
    names = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert {"ca.crt", "gateway.key", "service.crt", "alice.crt"} < names
    assert main(["certs", str(tmp_path), "--client", "../x"]) == 1
    assert "cannot be a client's name" in capsys.readouterr().err


def test_the_key_goes_with_each_call(gateway: Any, monkeypatch: Any) -> None:
    assert main(["models"]) == 0
    assert main(["models", "--api-key", "k-1"]) == 0
    monkeypatch.setenv("QUIRE_API_KEY", "k-2")
    assert main(["models"]) == 0
    assert gateway.authorizations == [None, "Bearer k-1", "Bearer k-2"]


def test_refused_keys_and_unusable_files_are_errors_of_their_own(
    gateway: Any, tmp_path: Path, capsys: Any
) -> None:
    gateway.refuse(grpc.StatusCode.UNAUTHENTICATED, "no API key")
    assert main(["models"]) == 1
    assert "no API key (QUIRE_API_KEY, or --api-key, gives this command its key)" in (
        capsys.readouterr().err
    )
    with Client(gateway.address) as client, pytest.raises(NotAllowed, match="no API key"):
        client.models()
    with pytest.raises(BadTls, match=r"cannot read .*none.crt: No such file"):
        Client(gateway.address, tls=Tls(tmp_path / "none.crt"))
    with pytest.raises(BadTls, match="both a certificate and its key"):
        Client(gateway.address, tls=Tls(certificate=tmp_path / "x.crt"))
