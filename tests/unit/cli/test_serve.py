"""What `quire serve` says of arguments that cannot be."""

from pathlib import Path
from typing import Any

import pytest

from quire.cli import main


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-gap-ms", "abc", "'abc' is not a number of milliseconds"),
        ("--max-gap-ms", "-1", "'-1' is not a number of milliseconds"),
        ("--max-gap-ms", "nan", "'nan' is not a number of milliseconds"),
        ("--park-window", "abc", "'abc' is not a number of seconds"),
        ("--grpc-port", "70000", "'70000' is not a port"),
        ("--pool-memory", "much", "'much' is not a size such as 512MiB or 2GiB"),
    ],
)
def test_a_value_that_cannot_be_is_named(capsys: Any, flag: str, value: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"argument {flag}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/where", "there is no directory /no/where"),
        ("nowhere", "there is no directory nowhere"),
        ("org/tiny", "download it with: hf download org/tiny"),
    ],
)
def test_a_model_that_is_not_there_is_named(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, message: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main(["serve", "--model", model, "--run-root", str(tmp_path / "runs")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
