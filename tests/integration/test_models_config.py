"""ModelConfig reads the configuration that transformers writes."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from bench.make_checkpoint import make_checkpoint
from services.model.checkpoint.reading import read_model_config

from .models_oracle import SPECS, RecordingRunner, random_prompt


@pytest.mark.parametrize("name", SPECS)
def test_a_config_means_the_same_after_transformers_has_rewritten_it(
    tmp_path: Path, name: str
) -> None:
    """transformers 5 writes `rope_parameters`, `dtype` and `layer_types`; the tests' checkpoints
    have the older names."""
    ours = make_checkpoint(tmp_path / "ours", SPECS[name])
    AutoConfig.from_pretrained(ours).save_pretrained(tmp_path / "theirs")
    rewritten = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "rope_parameters" in rewritten
    assert "rope_scaling" not in rewritten
    generation = (ours / "generation_config.json").read_bytes()
    (tmp_path / "theirs" / "generation_config.json").write_bytes(generation)
    before, after = (read_model_config(tmp_path / d) for d in ("ours", "theirs"))
    assert after == before


def test_a_checkpoint_that_transformers_has_saved_is_served(tmp_path: Path) -> None:
    ours = make_checkpoint(tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(ours).save_pretrained(
        tmp_path / "theirs", max_shard_size="200KB"
    )
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    answers = []
    for directory in (ours, tmp_path / "theirs"):
        recording = RecordingRunner(directory, block_size=16, num_blocks=4)
        trial = recording.place(random_prompt(20, seed=1))
        recording.decode_all([trial], chunk=64)
        answers.append(trial.new_tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("mistral-window", "sliding_window"),
        ("mistral-window", "use_sliding_window"),
        ("qwen2-window-in-upper-half", "sliding_window"),
        ("qwen2-window-in-upper-half", "use_sliding_window"),
        ("qwen3-window-in-upper-half", "max_window_layers"),
    ],
)
def test_windows_are_those_of_transformers_where_the_config_is_silent(
    tmp_path: Path, name: str, absent: str
) -> None:
    path = make_checkpoint(tmp_path, SPECS[name]) / "config.json"
    config = json.loads(path.read_text())
    del config[absent]
    path.write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * theirs.num_hidden_layers)
    assert read_model_config(tmp_path).windows == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds
    )
