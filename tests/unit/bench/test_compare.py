"""`python -m bench.compare`: which peers take part; measured values are kept (rounds may take
hours)."""

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
    """One round of Quire and one of the peer, and then a failure; returns the JSON file."""
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
    """Also after an interruption or a failure."""
    values = measured(monkeypatch, tmp_path, end)
    assert "2.00x" in capsys.readouterr().out
    assert Quire.name in json.dumps(values)


def test_peers_without_the_dtype_do_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; a named peer without it is an error."""
    for peer in PEERS.values():
        monkeypatch.setattr(type(peer), "is_ready", True)
    names = [peer.name for peer in compare.chosen_peers(None, "int4")]
    assert names == ["openvino", "openvino-128", "llama.cpp", "llama.cpp-k"]
    assert "llama.cpp-k" not in [peer.name for peer in compare.chosen_peers(None, "int8")]
    with pytest.raises(SystemExit, match="no int4 weights: vllm; leave"):
        compare.chosen_peers(["vllm", "openvino"], "int4")


def test_int4_stands_beside_quire_s_int8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine gets the dtype that its column names; the ratio is to the peer alone."""
    rates = {("quire", "int4"): 6.0, ("quire", "int8"): 8.0, ("llama.cpp", "int4"): 3.0}

    async def one_round(who: compare.Contestant, *_: object) -> list[tuple[Row, float]]:
        return [(RATE, rates[who.peer.name, who.dtype])]

    monkeypatch.setattr(compare, "one_round", one_round)
    monkeypatch.setattr(compare, "checkpoint", lambda shape: tmp_path)
    monkeypatch.setattr(type(PEERS["llama.cpp"]), "is_ready", True)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    arguments = ["compare", "--rounds", "1", "--dtype", "int4", "--peers", "llama.cpp"]
    monkeypatch.setattr("sys.argv", arguments)
    compare.main()
    header, _, row = capsys.readouterr().out.splitlines()
    assert header == (
        "|  | quire (int4 by 64) | quire (int8) | llama.cpp (Q4_0) | ratio | better |"
    )
    assert row == "| rate | 6 | 8 | 3 | 2.00x | higher |"
