"""The fields that ModelConfig reads from a checkpoint's JSON files, and its refusals."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from services.model.checkpoint.reading import read_model_config
from services.model.config.families import FAMILIES
from services.model.config.model_config import GenerationDefaults, ModelConfig
from services.model.config.rope_config import RopeConfig
from services.runtime.errors import StartupError

from .config_files import LLAMA3, LONGROPE, QWEN3, read, write

MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "head_dim": None}
QWEN_SLIDES: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 3}
FULL, SLIDING = "full_attention", "sliding_attention"


def test_qwen3_0_6b_reads_as_published(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
    }
    assert read(tmp_path, generation) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        family=FAMILIES["Qwen3ForCausalLM"],
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        ropes=(RopeConfig(theta=1_000_000.0),) * 28,
        attention_scale=128**-0.5,
        tied_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=(None,) * 28,
        dtype="bfloat16",
        eos_token_ids=(151645, 151643),
        generation=GenerationDefaults(
            temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05
        ),
    )


def test_families_differ_in_biases_and_head_size(tmp_path: Path) -> None:
    def facts(**changes: Any) -> tuple[bool, bool, bool, int, int]:
        c = read(tmp_path, **changes)
        return c.qkv_bias, c.o_bias, c.mlp_bias, c.num_kv_heads, c.head_dim

    qwen2 = facts(architectures=["Qwen2ForCausalLM"], head_dim=None)
    assert qwen2 == (True, False, False, 8, 64)
    llama = {"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_key_value_heads": None}
    assert facts(**llama, attention_bias=True, mlp_bias=True) == (True, True, True, 16, 64)
    assert facts(**MISTRAL, attention_bias=True) == (False, False, False, 8, 64)


def test_head_size_that_is_not_in_the_file_is_the_familys(tmp_path: Path) -> None:
    config = {name: value for name, value in QWEN3.items() if name != "head_dim"}
    assert read_model_config(write(tmp_path, config)).head_dim == 128


@pytest.mark.parametrize("value", [None, False, 0, [], {}])
def test_unknown_field_that_says_nothing_is_ignored(tmp_path: Path, value: object) -> None:
    assert read(tmp_path, attn_temperature=value, dropout_version=3) == read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL | {"sliding_window": 3}, (3, 3, 3, 3)),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL | {"sliding_window": 3, "layer_types": [SLIDING] * 4}, (3, 3, 3, 3)),
        (MISTRAL | {"sliding_window": 3, "use_sliding_window": False}, (3, 3, 3, 3)),
        ({"sliding_window": 3, "max_window_layers": 1}, (None,) * 4),
        ({"use_sliding_window": True}, (None,) * 4),
        (QWEN_SLIDES | {"max_window_layers": 1}, (None, 3, 3, 3)),
        (QWEN_SLIDES | {"max_window_layers": 0}, (3, 3, 3, 3)),
        (QWEN_SLIDES, (None,) * 4),  # transformers' default is 28 layers
        (QWEN_SLIDES | {"layer_types": [SLIDING, FULL, FULL, SLIDING]}, (3, None, None, 3)),
        ({"layer_types": [FULL] * 4}, (None,) * 4),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 3}, (None,) * 4),
    ],
    ids=str,
)
def test_layers_have_windows_of_their_own(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, **{"num_hidden_layers": 4} | changes).windows == windows


@pytest.mark.parametrize("changes", [MISTRAL, {"use_sliding_window": True, "max_window_layers": 0}])
def test_a_window_that_is_not_in_the_file_is_of_4096_positions(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Null, however, means no window."""
    config = QWEN3 | {"num_hidden_layers": 2} | changes
    del config["sliding_window"]
    assert read_model_config(write(tmp_path, config)).windows == (4096, 4096)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (151645,)),
        ({}, (151645,)),
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [3, 1]}, (3, 1)),
    ],
)
def test_eos_comes_from_generation_config_first(
    tmp_path: Path, generation: object, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, generation).eos_token_ids == expected


def test_a_config_without_eos_has_none(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_dtype_has_an_old_and_a_new_name(tmp_path: Path) -> None:
    assert read(tmp_path, torch_dtype=None, dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architectures: 'DeepseekV3ForCausalLM'"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "1024"}, "hidden_size: '1024'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"num_attention_heads": True}, "num_attention_heads: True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"head_dim": 63}, "head_dim: 63 is odd"),
        (
            {"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 1025},
            "hidden_size: 1025 is not a multiple",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: 'small'"),
        ({"rope_theta": 0}, "rope_theta: 0"),
        ({"rope_scaling": "llama3"}, "rope_scaling: 'llama3'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_scaling.rope_type: 'ntk'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 9}}, "rope_scaling.alpha: 9"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "rope_scaling.long_factor: 1 numb"),
        ({"rope_scaling": LONGROPE | {"short_factor": [0] * 64}}, "rope_scaling.short_factor: not"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: missing"),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}},
            "rope_parameters.high_freq_factor",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
        ({"attn_temperature": 2.0}, "attn_temperature: 2.0: Quire does not know this field"),
        ({"mlp_bias": True}, "mlp_bias: True: Quire does not know this field"),
        ({"rope_scaling": {"mrope_section": [4, 6, 6]}}, "rope_scaling.mrope_section: [4, 6, 6]"),
        (
            {"architectures": ["LlamaForCausalLM"], "use_sliding_window": True},
            "use_sliding_window: this architecture has no sliding window",
        ),
        (MISTRAL | {"sliding_window": 0}, "sliding_window: 0"),
        (MISTRAL | {"sliding_window": "4096"}, "sliding_window: '4096'"),
        (QWEN_SLIDES | {"max_window_layers": -1}, "max_window_layers: -1"),
        ({"layer_types": [FULL]}, "layer_types: ['full_attention'] is not a list of 28"),
        ({"layer_types": FULL}, "layer_types: 'full_attention' is not a list of 28"),
        ({"layer_types": [SLIDING] * 28}, "layer_types: 'sliding_attention' is none of full_"),
        (QWEN_SLIDES | {"layer_types": ["chunked"] * 28}, "layer_types: 'chunked' is none of full"),
        (QWEN_SLIDES | {"layer_types": [[]] * 28}, "layer_types: [] is none of full"),
        (
            MISTRAL | {"sliding_window": 3, "layer_types": [SLIDING] * 27 + [FULL]},
            "layer_types: all layers of this architecture are sliding_attention",
        ),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config: quantized by 'hqq'; ",
        ),
        (
            {"quantization": {"group_size": 64}},
            "quantization: MLX's quantized weights are not read",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: 'float8_e4m3fn'"),
        ({"eos_token_id": 151936}, "eos_token_id: 151936 is outside"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>'"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartupError) as refused:
        read(tmp_path, **changes)
    assert str(refused.value).startswith(f"{tmp_path}/config.json: {named}")


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"eos_token_id": [1, 2.5]}, "eos_token_id"),
        ({"temperature": -1}, "temperature: -1"),
        ({"top_k": 2.5}, "top_k: 2.5"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0"),
        ([], "not a JSON object"),
    ],
)
def test_a_wrong_generation_config_is_refused(
    tmp_path: Path, generation: object, named: str
) -> None:
    with pytest.raises(StartupError) as refused:
        read(tmp_path, generation)
    assert str(refused.value).startswith(f"{tmp_path}/generation_config.json: {named}")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such checkpoint directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(StartupError, match=r"config\.json: No such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"config\.json: not JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match=r"config\.json: not JSON"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (50.0, 50), (20, 20)])
def test_top_k_of_a_generation_config(tmp_path: Path, top_k: float, expected: int) -> None:
    assert read(tmp_path, {"top_k": top_k}).generation.top_k == expected


def test_an_end_token_that_only_the_tokenizer_names_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert read(tmp_path, eos_token_id=None).eos_token_ids == (1,)
    assert read(tmp_path, eos_token_id=7).eos_token_ids == (7,)
