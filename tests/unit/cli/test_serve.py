"""What `quire serve` says of arguments that cannot be."""

from pathlib import Path
from typing import Any

import pytest

from quire.cli import main


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-gap-ms", "abc", "'abc' is not a number from 0 on"),
        ("--max-gap-ms", "-1", "'-1' is not a number from 0 on"),
        ("--max-gap-ms", "nan", "'nan' is not a number from 0 on"),
        ("--max-gap-ms", "inf", "'inf' is not a number from 0 on"),
        ("--park-window", "abc", "'abc' is not a number from 0 on"),
        ("--grpc-port", "70000", "less than or equal to 65535"),
        ("--decode", "0", "greater than or equal to 1"),
        ("--dtype", "float8", "'auto', 'bfloat16', 'float32'"),
        ("--pool-memory", "much", "'much' is not a size such as 512MiB or 2GiB"),
    ],
)
def test_a_value_that_cannot_be_is_named(capsys: Any, flag: str, value: str, message: str) -> None:
    """One line names the flag and says what it takes."""
    assert main(["serve", f"{flag}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: Invalid value for '{flag}'")
    assert message in line
    assert line.endswith(" (see `quire serve --help`)")


def test_cpus_and_threads_exclude_each_other(capsys: Any) -> None:
    assert main(["serve", "--cpus", "0-3", "--threads", "2"]) == 2
    assert "--cpus and --threads exclude each other" in capsys.readouterr().err


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
