"""`python -m bench.compare`: rounds may take hours, and what they measured is not lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import compare
from bench.peers.peer import PeerFailed
from bench.peers.quire import Quire
from bench.peers.registry import PEERS
from bench.serving.comparison import Row

RATE = Row("rate", "higher")


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: type[BaseException]) -> Any:
    """One round of ours and one of the peer's, and then something happens; the JSON file."""
    peer = next(iter(PEERS.values()))
    values = iter([10.0, 5.0])

    async def one_round(*_: object) -> list[tuple[Row, float]]:
        if (value := next(values, None)) is None:
            raise end
        return [(RATE, value)]

    path = tmp_path / "values.json"
    monkeypatch.setattr(compare, "one_round", one_round)
    monkeypatch.setattr(compare, "checkpoint", lambda shape: tmp_path)
    monkeypatch.setattr(type(peer), "is_ready", True)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    arguments = ["compare", "--rounds", "2", "--peers", peer.name, "--json", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 1
    return json.loads(path.read_text())


@pytest.mark.parametrize("end", [KeyboardInterrupt, PeerFailed])
def test_measured_values_are_shown(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    end: type[BaseException],
) -> None:
    """Whether it was interrupted or somebody failed."""
    values = measured(monkeypatch, tmp_path, end)
    assert "2.00x" in capsys.readouterr().out
    assert Quire.name in json.dumps(values)
