"""The table of families: the result of each family's config.json, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.fingerprint import fingerprint
from services.model.checkpoint.reading import read_model_config
from services.model.config.families import FAMILIES
from services.model.config.layout import weight_shapes
from services.model.config.model_config import ModelConfig
from services.model.config.rope_config import LinearScaling, LongScaling, RopeConfig
from services.runtime.errors import StartupError

BASE: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "max_position_embeddings": 8192,
    "attention_dropout": 0.1,
    "initializer_range": 0.02,
    "transformers_version": "5.0.0",
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "num_experts": 2}


def read(directory: Path, architecture: str, **fields: Any) -> ModelConfig:
    config = {"architectures": [architecture], **BASE, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_config(directory)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_reads_a_config_with_transformers_defaults(
    architecture: str, tmp_path: Path
) -> None:
    config = read(tmp_path, architecture)
    assert config.family is FAMILIES[architecture]
    assert len(config.windows) == len(config.ropes) == 4


def test_gemma2_has_caps_and_a_window_in_every_second_layer(tmp_path: Path) -> None:
    config = read(tmp_path, "Gemma2ForCausalLM", query_pre_attn_scalar=144, hidden_act="gelu")
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    assert (config.attention_scale, config.embedding_scale) == (1 / 12, 96**0.5)
    assert (config.head_dim, config.tied_embeddings) == (256, True)
    plain = read(tmp_path, "Gemma2ForCausalLM", attn_logit_softcapping=None)
    assert (plain.attention_cap, plain.logit_cap) == (None, 30.0)


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 7e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
            }
        },
    ],
    ids=["before transformers 5", "since"],
)
def test_gemma3_rotates_layers_with_a_window_by_a_base_of_their_own(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    config = read(
        tmp_path, "Gemma3ForCausalLM", sliding_window=512, sliding_window_pattern=3, **rope
    )
    local, full = RopeConfig(7e3), RopeConfig(5e5, LinearScaling(8.0))
    assert config.windows == (512, 512, None, 512)
    assert config.ropes == (local, local, full, local)


def test_smollm3_has_layers_without_rotation(tmp_path: Path) -> None:
    rope = RopeConfig(2_000_000.0)
    assert read(tmp_path, "SmolLM3ForCausalLM").ropes == (rope, rope, rope, None)
    config = read(
        tmp_path,
        "SmolLM3ForCausalLM",
        no_rope_layers=[1, 0, 0, 1],
        use_sliding_window=True,
        sliding_window=50,
    )
    assert config.ropes == (rope, None, None, rope)
    assert config.windows == (None, 50, 50, None)


def test_granite_has_factors(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "GraniteForCausalLM",
        attention_multiplier=0.5,
        embedding_multiplier=12,
        residual_multiplier=0.22,
        logits_scaling=4,
    )
    found = config.attention_scale, config.embedding_scale, config.residual_scale
    assert (*found, config.logit_scale) == (0.5, 12.0, 0.22, 0.25)
    assert read(tmp_path, "GraniteForCausalLM").attention_scale == 1.0


def test_phi3_has_fused_linears_and_rotates_a_part_of_a_head(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = read(
        tmp_path,
        "Phi3ForCausalLM",
        partial_rotary_factor=0.5,
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=2048,
    )
    (rope,) = set(config.ropes)
    assert rope is not None
    assert rope.width == 12
    assert isinstance(rope.scaling, LongScaling)
    shapes = weight_shapes(config)
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (192, 96)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (256, 96)
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes


def test_olmo2_has_norms_of_outputs_and_over_all_heads(tmp_path: Path) -> None:
    shapes = weight_shapes(read(tmp_path, "Olmo2ForCausalLM", tie_word_embeddings=True))
    norms = {name: shape for name, shape in shapes.items() if "layers.3" in name and "norm" in name}
    assert norms == {
        "model.layers.3.self_attn.q_norm.weight": (96,),
        "model.layers.3.self_attn.k_norm.weight": (48,),
        "model.layers.3.post_attention_layernorm.weight": (96,),
        "model.layers.3.post_feedforward_layernorm.weight": (96,),
    }


@pytest.mark.parametrize(
    ("architecture", "fields", "text"),
    [
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("Gemma2ForCausalLM", {"hidden_activation": "silu"}, "hidden_activation: 'silu' is not"),
        ("GraniteForCausalLM", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("GraniteForCausalLM", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.3}, "0.3 of heads of 24: rotates an odd"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "short_factor": [1.0]}}, "short_f"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 5.0}}, "has neither full_att"),
        ("Qwen3MoeForCausalLM", SLIDING | {"layer_types": ["full_attention"] * 4}, "all layers of"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, r"no_rope_layers: \[1, 0\] is not"),
        ("LlamaForCausalLM", {"residual_multiplier": 0.5}, "residual_multiplier: 0.5: Quire does"),
        ("Olmo2ForCausalLM", {"sliding_window": 4096}, "sliding_window: 4096: Quire does not know"),
    ],
)
def test_field_that_a_family_does_not_compute_is_refused(
    architecture: str, fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=text):
        read(tmp_path, architecture, **fields)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}),
        ("LlamaForCausalLM", {"unsloth_fixed": True, "neftune_noise_alpha": 5.0}),
        ("Phi3ForCausalLM", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        ("Qwen3MoeForCausalLM", {"use_qk_norm": True, "shared_expert_intermediate_size": 0}),
    ],
    ids=["SmolLM2", "fine-tuned", "Phi-4-mini", "Qwen3-Coder"],
)
def test_field_of_a_published_checkpoint_that_says_nothing_changes_nothing(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    plain = read(tmp_path, architecture)
    assert read(tmp_path, architecture, **fields) == plain


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Phi3ForCausalLM", {"interpolate_factor": 2}),
        ("Qwen3MoeForCausalLM", {"use_qk_norm": "per layer"}),
        ("LlamaForCausalLM", {"use_qk_norm": True}),
    ],
)
def test_same_field_with_another_value_is_refused(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match="Quire does not know this field"):
        read(tmp_path, architecture, **fields)


def test_unknown_architecture_is_refused_with_all_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as refused:
        read(tmp_path, "MambaForCausalLM")
    assert "'MambaForCausalLM' is not supported; these are: " in str(refused.value)
    assert all(name in str(refused.value) for name in FAMILIES)


def test_fingerprint_depends_on_the_row_and_on_the_context_of_longrope(tmp_path: Path) -> None:
    def of(config: ModelConfig) -> str:
        return fingerprint(config, "digest", torch.bfloat16, 16, {})

    plain = read(tmp_path, "LlamaForCausalLM")
    other_row = replace(plain, family=replace(plain.family, norm_offset=1.0))
    fields = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    long = read(tmp_path, "LlamaForCausalLM", rope_scaling={"type": "longrope", **fields})
    found = [of(config) for config in (plain, other_row, long, long.for_context(4096))]
    assert len(set(found)) == 4
    assert of(plain.for_context(4096)) == found[0]
