"""The default sampling parameters: the model's, none, those of a directory, and overrides."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from services.gateway.config import GatewaySettings
from services.gateway.workers.models.generation_config import GenerationConfig
from services.model.config.model_config import GenerationDefaults
from services.runtime.errors import StartupError

OF_MODEL = GenerationDefaults(temperature=0.6, top_k=20, max_new_tokens=99)


@pytest.mark.parametrize(
    ("source", "override", "expected"),
    [
        ("auto", None, OF_MODEL),
        ("auto", '{"temperature": 0}', replace(OF_MODEL, temperature=0.0)),
        ("vllm", None, GenerationDefaults()),
        ("vllm", '{"temperature": 0}', GenerationDefaults(temperature=0.0)),
    ],
)
def test_an_override_replaces_single_parameters(
    source: str, override: str | None, expected: GenerationDefaults
) -> None:
    """`auto` takes those of the model, and `vllm` none."""
    assert GenerationConfig.read(source, override).defaults(OF_MODEL) == expected


def test_a_directory_replaces_the_models(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.8}')
    config = GenerationConfig.read(str(tmp_path), None)
    assert config.defaults(OF_MODEL) == GenerationDefaults(top_p=0.8)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        (json.dumps({"temprature": 1}), "'temprature' is not one of temperature, top_k"),
        (json.dumps({"top_p": 2}), "top_p: 2 is above 1"),
        (json.dumps({"max_new_tokens": 0}), "max_new_tokens: 0 is not an integer >= 1"),
    ],
)
def test_a_wrong_override_is_told_at_the_start(override: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        GenerationConfig.read("auto", override)


def test_a_missing_directory_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        GenerationConfig.read(str(tmp_path / "nothing"), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"override_generation_config": '{"temperature": -3}'}, "temperature: -3 is not 0 or more"),
        ({"generation_config": "/nope"}, "/nope/generation_config.json: No such file"),
        ({"lora": "poet=/nope"}, "--lora poet=/nope: there is no adapter_config.json"),
    ],
)
def test_a_gateway_checks_its_files_and_defaults_before_it_starts(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        GatewaySettings(**settings).check()  # type: ignore[arg-type]  # read from texts
