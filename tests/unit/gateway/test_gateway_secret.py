import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.gateway.secret import FILE_NAME, deployment_secret


def test_a_configured_secret_is_taken_and_no_file_made(tmp_path: Path) -> None:
    assert deployment_secret("s3cret", None, tmp_path) == b"s3cret"
    assert not list(tmp_path.iterdir())


def test_a_named_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text("s3cret\n")
    assert deployment_secret(None, file, tmp_path / "run") == b"s3cret"


def test_everybody_who_comes_at_once_gets_the_same_secret(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ThreadPoolExecutor(16) as threads:
        secrets = set(threads.map(lambda _: deployment_secret(None, None, run_dir), range(64)))
    assert len(secrets) == 1
    assert len(secrets.pop()) >= 32
    assert os.listdir(run_dir) == [FILE_NAME]
    assert (run_dir / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_another_run_has_another_secret(tmp_path: Path) -> None:
    one, two = (deployment_secret(None, None, tmp_path / name) for name in "ab")
    assert one != two


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("known")
    (tmp_path / FILE_NAME).chmod(0o644)
    with pytest.raises(StartupError, match="mode 0644"):
        deployment_secret(None, None, tmp_path)


def test_a_secret_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made the file knows what is in it, whatever its mode is."""
    deployment_secret(None, None, tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StartupError, match=f"belongs to user {owner}; it must .* {owner + 1}"):
        deployment_secret(None, None, tmp_path)


def test_a_secret_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Its target may be exchanged."""
    (tmp_path / "other").write_text("known")
    (tmp_path / "other").chmod(0o600)
    (tmp_path / FILE_NAME).symlink_to("other")
    with pytest.raises(StartupError, match="cannot read the secret"):
        deployment_secret(None, None, tmp_path)


def test_a_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """Reading it does not wait for a writer either."""
    os.mkfifo(tmp_path / FILE_NAME, 0o600)
    with pytest.raises(StartupError, match="is not a file"):
        deployment_secret(None, None, tmp_path)


@pytest.mark.parametrize(
    ("configured", "file", "text"),
    [("a", "given", "both set"), ("", None, "is empty"), (None, "missing", "cannot read")],
)
def test_bad_configuration_is_told(
    tmp_path: Path, configured: str | None, file: str | None, text: str
) -> None:
    with pytest.raises(StartupError, match=text):
        deployment_secret(configured, tmp_path / file if file else None, tmp_path)
