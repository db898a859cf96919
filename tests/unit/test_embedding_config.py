"""The files by which a checkpoint declares that it makes embeddings."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.model.checkpoint.embedding_config import EmbeddingConfig
from services.runtime.errors import StartupError

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


def read(
    tmp_path: Path,
    pooling: dict[str, Any] | None = None,
    modules: Any = (TRANSFORMER, POOLING, NORMALIZE),
    **config: Any,
) -> EmbeddingConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return EmbeddingConfig.from_directory(tmp_path)


def test_a_checkpoint_that_says_nothing_has_the_last_token(tmp_path: Path) -> None:
    assert read(tmp_path) == EmbeddingConfig("last", ())


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
    ],
)
def test_sentence_transformers_say_what_is_pooled(
    tmp_path: Path, pooling: dict[str, Any], mode: str
) -> None:
    assert read(tmp_path, pooling) == EmbeddingConfig(mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pooling", "problem"),
    [
        ({"pooling_mode_cls_token": True}, "its pooling is pooling_mode_cls_token"),
        ({"pooling_mode": "max"}, "its pooling is max"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "its pooling is mean, lasttoken",
        ),
        ({}, "its pooling is none"),
    ],
)
def test_other_poolings_are_a_problem(
    tmp_path: Path, pooling: dict[str, Any], problem: str
) -> None:
    assert read(tmp_path, pooling).problem.startswith(problem)


def test_other_modules_are_a_problem(tmp_path: Path) -> None:
    found = read(tmp_path, {"pooling_mode": "mean"}, [TRANSFORMER, POOLING, DENSE])
    assert found.problem == "its module Dense is not supported"


@pytest.mark.parametrize("modules", [3, [{"path": ""}], ["x"]])
def test_modules_that_are_none_are_refused(tmp_path: Path, modules: Any) -> None:
    with pytest.raises(StartupError, match=r"modules\.json: not a list of modules"):
        read(tmp_path, {"pooling_mode": "mean"}, modules)


def test_shorter_embeddings_are_those_that_the_model_is_trained_for(tmp_path: Path) -> None:
    assert read(tmp_path, matryoshka_dimensions=[32, 16]).dimensions == (32, 16)
    assert read(tmp_path, is_matryoshka=True).dimensions is None
    with pytest.raises(StartupError, match="matryoshka_dimensions: \\[0\\] is not"):
        read(tmp_path, matryoshka_dimensions=[0])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sbert_ce_default_activation_function": "a.Tanh", "num_labels": 1}, "a.Tanh is not"),
        ({}, "num_labels: 2: only heads with 1 label"),
    ],
)
def test_other_classification_heads_are_refused(tmp_path: Path, fields: Any, problem: str) -> None:
    config = {"architectures": ["LlamaForSequenceClassification"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=problem):
        EmbeddingConfig.from_directory(tmp_path)
