"""`quire advise block-size`: its options, and its output."""

import json
from typing import Any

import pytest

from advisor import advice
from quire.cli import main

ANSWER: dict[str, Any] = {
    "block_size": 16,
    "reasons": ["16 leaves 90.0% of the machine"],
    "notes": ["flash-attn"],
    "sizes": [
        {
            "block_size": size,
            "utilization": 0.971,
            "tail": 0.012,
            "look_ahead": 0.017,
            "num_at_once": 31.4,
            "blocks_per_request": 500 / size,
            "store_calls_per_token": 0.123,
            "store_us_per_token": 18.25,
            "lost_tokens": 7.5,
            "attention_us": 123.4,
            "left": 0.9,
        }
        for size in (8, 16)
    ],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options with which it ran, with ANSWER as the result."""
    seen: list[dict[str, Any]] = []

    def answer(**options: Any) -> dict[str, Any]:
        seen.append(options)
        return ANSWER

    monkeypatch.setattr(advice, "recommend", answer)
    return seen


def test_a_table_and_the_recommendation(asked: list[dict[str, Any]], capsys: Any) -> None:
    assert main(["advise", "block-size", "--workload", "w.jsonl", "--pool-memory", "2GiB"]) == 0
    head, first, second, empty, *rest = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "BLOCK SIZE"
    cells = "8 97.1% 1.2% 1.7% 31.4 62.5 0.123 18.2 7.5 123.4 90.0%"
    assert " ".join(first.split()) == cells
    assert second.split()[0] == "16"
    assert empty == ""
    assert rest == ["--block-size 16", "  16 leaves 90.0% of the machine", "  flash-attn"]
    (options,) = asked
    assert (str(options["workload"]), options["pool_memory"]) == ("w.jsonl", "2GiB")
    assert options["model"].stem == "SmolLM2-135M-Instruct.Q4_1"


def test_json_is_the_whole_answer(asked: list[dict[str, Any]], capsys: Any) -> None:
    assert main(["advise", "block-size", "--workload", "w.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_a_model_that_is_not_there_is_told_at_once(capsys: Any) -> None:
    assert main(["advise", "block-size", "--workload", "w", "--model", "/nowhere"]) == 1
    assert capsys.readouterr().err == "quire: there is no directory /nowhere\n"


@pytest.mark.parametrize(
    "args", [["advise"], ["advise", "block-size"], ["advise", "block-size", "--threads", "0"]]
)
def test_wrong_usage(args: list[str], capsys: Any) -> None:
    assert main(args) == 2
