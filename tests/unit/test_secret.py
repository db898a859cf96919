"""The deployment's secret: its sources, and the keys derived from it."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import SecretStr
from pydantic_settings import SettingsConfigDict

from services.runtime.config import ServiceSettings
from services.runtime.errors import StartupError
from services.runtime.secret import FILE_NAME, Secret, deployment_secret

GIVEN = "a secret of 16 b"


class CookSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_COOK_")
    service: ClassVar[str] = "cook"


def settings(run_dir: Path, secret: str | None = None, file: Path | None = None) -> CookSettings:
    return CookSettings(
        run_dir=run_dir, secret=None if secret is None else SecretStr(secret), secret_file=file
    )


def secret_of(*given: str | Path | None) -> bytes:
    return deployment_secret(settings(*given)).root  # type: ignore[arg-type]


def test_a_configured_secret_is_taken_and_no_file_made(tmp_path: Path) -> None:
    assert secret_of(tmp_path, GIVEN) == GIVEN.encode()
    assert not list(tmp_path.iterdir())


def test_a_named_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(f"{GIVEN}\n")
    assert secret_of(tmp_path / "run", None, file) == GIVEN.encode()


def test_concurrent_readers_get_the_same_secret(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run"
    with ThreadPoolExecutor(16) as threads:
        secrets = set(threads.map(lambda _: secret_of(run_dir), range(64)))
    assert len(secrets) == 1
    assert len(secrets.pop()) >= 32
    assert os.listdir(run_dir) == [FILE_NAME]
    assert (run_dir / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert run_dir.stat().st_mode & 0o777 == run_dir.parent.stat().st_mode & 0o777 == 0o700


def test_runs_have_different_secrets(tmp_path: Path) -> None:
    one, two = (secret_of(tmp_path / name) for name in "ab")
    assert one != two


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("known")
    (tmp_path / FILE_NAME).chmod(0o644)
    with pytest.raises(StartupError, match="mode 0644"):
        secret_of(tmp_path)


def test_a_secret_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user who made the file knows its content, whatever its mode is."""
    secret_of(tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StartupError, match=f"belongs to user {owner}; it must .* {owner + 1}"):
        secret_of(tmp_path)


def test_a_secret_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """The link's target could be exchanged."""
    (tmp_path / "other").write_text("known")
    (tmp_path / "other").chmod(0o600)
    (tmp_path / FILE_NAME).symlink_to("other")
    with pytest.raises(StartupError, match="cannot read the secret"):
        secret_of(tmp_path)


def test_a_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """The check does not wait for a writer either."""
    os.mkfifo(tmp_path / FILE_NAME, 0o600)
    with pytest.raises(StartupError, match="is not a file"):
        secret_of(tmp_path)


@pytest.mark.parametrize(
    ("configured", "file", "text"),
    [
        ("a", "given", "QUIRE_COOK_SECRET and QUIRE_COOK_SECRET_FILE are both set"),
        ("", None, "QUIRE_COOK_SECRET is empty"),
        ("s3cret", None, "has 6 bytes, fewer than 16"),
        (None, "missing", "cannot read"),
    ],
)
def test_bad_configuration_is_told(
    tmp_path: Path, configured: str | None, file: str | None, text: str
) -> None:
    with pytest.raises(StartupError, match=text):
        secret_of(tmp_path, configured, tmp_path / file if file else None)


def test_every_use_has_a_key_of_its_own_that_does_not_tell_the_secret() -> None:
    secret, other = Secret(GIVEN.encode()), Secret(GIVEN.encode() + b"!")
    keys = {secret.root, secret.registry_key, secret.rpc_key, other.registry_key, other.rpc_key}
    assert len(keys) == 5
    assert secret.rpc_key != hashlib.sha256(secret.root).digest()
    assert GIVEN not in repr(secret)
