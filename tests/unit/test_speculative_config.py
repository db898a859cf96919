"""The setting `speculative_config`: accepted values, and workers that refuse it."""

from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.common.runtime.config import load_settings
from services.decode.config import DecodeSettings
from services.worker.speculative_config import SpeculativeConfig


def settings(monkeypatch: pytest.MonkeyPatch, **values: str) -> DecodeSettings:
    for name, value in {"model": "/m", **values}.items():
        monkeypatch.setenv(f"QUIRE_DECODE_{name.upper()}", value)
    return load_settings(DecodeSettings)


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 7}, (2, 7)),
    ],
)
def test_the_sizes_of_ngrams(bounds: dict[str, int], sizes: tuple[int, int]) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5, **bounds)
    assert config.ngram_sizes == sizes


def test_the_setting_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(monkeypatch).speculative_config is None
    text = '{"method": "ngram", "num_speculative_tokens": 6}'
    config = settings(monkeypatch, speculative_config=text).speculative_config
    assert config == SpeculativeConfig(method="ngram", num_speculative_tokens=6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"method": "eagle", "num_speculative_tokens": 5}', "Input should be 'ngram'"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "greater than or equal to 1"),
        ('{"method": "ngram", "num_speculative_tokens": 5, "draft": 1}', "Extra inputs"),
        (
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 5, '
            '"prompt_lookup_max": 2}',
            "prompt_lookup_min 5 is above prompt_lookup_max 2",
        ),
        ("ngram", "QUIRE_DECODE_SPECULATIVE_CONFIG"),
    ],
)
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    with pytest.raises(StartupError, match=problem) as caught:
        settings(monkeypatch, speculative_config=text)
    assert "QUIRE_DECODE_SPECULATIVE_CONFIG" in str(caught.value)


@pytest.mark.parametrize(
    "values", [{"device": "cuda:0"}, {"backend": "reference"}, {"tensor_parallel_size": "2"}]
)
def test_workers_whose_kernels_do_not_promise_equal_bits_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, values: dict[str, str]
) -> None:
    """Before they load a model and join a pool."""
    text = '{"method": "ngram", "num_speculative_tokens": 6}'
    refused = settings(monkeypatch, speculative_config=text, **values)
    with pytest.raises(StartupError, match="only the backend 'cpu' in one process"):
        refused.check()
