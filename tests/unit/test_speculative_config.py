"""The setting `speculative_config`: accepted values, and workers that refuse it."""

import json
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from quire.speculative_config import SpeculativeConfig
from services.model.checkpoint.reading import read_model_config
from services.runtime.config import load_settings
from services.runtime.errors import StartupError
from services.worker.config import DecodeSettings
from services.worker.drafting import plan_draft


def settings(monkeypatch: pytest.MonkeyPatch, **values: str) -> DecodeSettings:
    for name, value in {"model": "/m", **values}.items():
        monkeypatch.setenv(f"QUIRE_DECODE_{name.upper()}", value)
    return load_settings(DecodeSettings)


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ({}, (1, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 7}, (2, 7)),
    ],
)
def test_the_sizes_of_ngrams(bounds: dict[str, int], sizes: tuple[int, int]) -> None:
    values = {"method": "ngram", "num_speculative_tokens": 5, **bounds}
    config = SpeculativeConfig.model_validate(values)
    assert config.ngram_sizes == sizes


def test_the_setting_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(monkeypatch).speculative_config is None
    text = '{"method": "ngram", "num_speculative_tokens": 6}'
    config = settings(monkeypatch, speculative_config=text).speculative_config
    assert config == SpeculativeConfig(method="ngram", num_speculative_tokens=6)


def test_a_model_makes_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    text = '{"model": "~/small", "num_speculative_tokens": 5, "draft_kv_memory": "2GiB"}'
    config = settings(monkeypatch, speculative_config=text).speculative_config
    assert config is not None
    assert (config.method, config.model) == ("draft_model", Path("/home/one/small"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=400)


def check_draft(monkeypatch: pytest.MonkeyPatch, target: Path, draft: Path) -> None:
    text = json.dumps({"model": str(draft), "num_speculative_tokens": 5})
    found = settings(monkeypatch, model=str(target), speculative_config=text)
    assert found.check_draft(read_model_config(target)) is not None


def test_a_draft_model_with_another_vocabulary_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    """Before anything is loaded."""
    draft = make_checkpoint(tmp_path / "draft", vocab_size=399)
    with pytest.raises(StartupError, match=r"a vocabulary of 399 tokens.* one of 400"):
        check_draft(monkeypatch, target, draft)


def test_a_draft_model_with_other_tokens_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    """Where both checkpoints have a tokenizer; a draft model needs none."""
    draft = make_checkpoint(tmp_path / "draft", vocab_size=400, num_layers=1)
    path = draft / "tokenizer.json"
    check_draft(monkeypatch, target, draft)
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    path.write_text(json.dumps(tokenizer))
    named = r"2 differ, such as '[et]', which is \d+ there and \d+ here"
    with pytest.raises(StartupError, match=named):
        check_draft(monkeypatch, target, draft)
    path.unlink()
    check_draft(monkeypatch, target, draft)


def test_a_draft_model_that_cannot_be_computed_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match="no such checkpoint directory"):
        check_draft(monkeypatch, target, tmp_path / "none")
    draft = make_checkpoint(tmp_path / "draft", vocab_size=400)
    config = json.loads((draft / "config.json").read_text())
    config["architectures"] = ["UnknownForCausalLM"]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="UnknownForCausalLM"):
        check_draft(monkeypatch, target, draft)


def test_the_memory_of_a_draft_models_kv(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    """At most draft_kv_memory, and at most what its sequences can fill. The draft model has 1 layer
    of 2 heads of 16: 2,048 bytes for a block of 16 tokens in bf16."""
    draft = make_checkpoint(
        tmp_path / "draft", vocab_size=400, num_layers=1, max_position_embeddings=100
    )
    config = read_model_config(target)

    def num_blocks(size: str, **values: str) -> int:
        text = json.dumps(
            {"model": str(draft), "num_speculative_tokens": 5, "draft_kv_memory": size}
        )
        found = settings(monkeypatch, model=str(target), speculative_config=text, **values)
        plan = plan_draft(found, config, "bfloat16")
        assert plan is not None
        assert plan.kv_bytes == plan.num_blocks * 2048
        assert plan.context == min(int(values["max_model_len"]), 100)
        return plan.num_blocks

    assert num_blocks("64KiB", max_model_len="1000") == 32
    assert num_blocks("1GiB", max_model_len="1000", max_num_seqs="8") == 8 * 7
    assert num_blocks("1GiB", max_model_len="40", max_num_seqs="8") == 8 * 3
    with pytest.raises(StartupError, match=r"holds 3 blocks of 2\.00 KiB .* needs at least 4"):
        num_blocks("6KiB", max_model_len="1000")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"method": "eagle", "num_speculative_tokens": 5}',
            "Input should be 'ngram' or 'draft_model'",
        ),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "greater than or equal to 1"),
        ('{"method": "ngram", "num_speculative_tokens": 5, "draft": 1}', "Extra inputs"),
        (
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 5, '
            '"prompt_lookup_max": 2}',
            "prompt_lookup_min 5 is above prompt_lookup_max 2",
        ),
        ("ngram", "QUIRE_DECODE_SPECULATIVE_CONFIG"),
        ('{"method": "draft_model", "num_speculative_tokens": 5}', "needs a model"),
        ('{"num_speculative_tokens": 5}', "method"),
        (
            '{"method": "ngram", "model": "/d", "num_speculative_tokens": 5}',
            "model is for the method draft_model",
        ),
        (
            '{"model": "/d", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
            "prompt_lookup_max is for the method ngram",
        ),
        (
            '{"model": "/d", "num_speculative_tokens": 5, "draft_kv_memory": "much"}',
            "'much' is not a size",
        ),
    ],
)
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    with pytest.raises(StartupError, match=problem) as caught:
        settings(monkeypatch, speculative_config=text)
    assert "QUIRE_DECODE_SPECULATIVE_CONFIG" in str(caught.value)


@pytest.mark.parametrize("source", ['"method": "ngram"', '"model": "/small"'])
@pytest.mark.parametrize(
    "values",
    [
        {"backend": "reference"},
        {"tensor_parallel_size": "2"},
        {"device": "cuda:0", "tensor_parallel_size": "2"},
    ],
)
def test_workers_that_verify_no_drafts_refuse(
    monkeypatch: pytest.MonkeyPatch, source: str, values: dict[str, str]
) -> None:
    """Before they load a model and join a pool."""
    text = f'{{{source}, "num_speculative_tokens": 6}}'
    refused = settings(monkeypatch, speculative_config=text, **values)
    with pytest.raises(StartupError, match="only the backends 'cpu' and 'triton' in one"):
        refused.check()


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ({}, 256),  # at most as many as a step has sequences by default
        ({"max_num_seqs": "8"}, 56),  # each with 6 drafts
        ({"max_num_seqs": "300"}, 300),
        ({"max_num_seqs": "8", "max_num_batched_tokens": "20"}, 20),
    ],
)
def test_a_gpu_has_rows_for_drafts(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], number: int
) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 6}'
    found = settings(monkeypatch, speculative_config=text, device="cuda:0", **values)
    found.check_speculation()
    assert found.num_decode_rows == number
