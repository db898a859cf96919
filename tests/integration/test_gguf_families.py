"""Every family and every kind of expert from GGUF files: transformers' greedy tokens."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench.make_checkpoint import make_checkpoint
from services.engine.weights.checkpoint import load_weights
from services.engine.weights.fused_weights import all_sections
from services.engine.weights.kinds import section_kinds
from services.model.checkpoint.check import check_weights
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.weights import weight_files
from services.model.config.model_config import ModelConfig
from services.model.gguf.config import served_bytes
from services.model.gguf.file import GgufFile
from services.runtime.errors import StartupError

from .family_checkpoints import CASES, Case, make
from .gguf_checkpoints import ARCHITECTURES, Metadata, number_refused, write_gguf, write_twin
from .models_oracle import Oracle, RecordingRunner, Trial, random_prompt
from .quantized_checkpoints import compare_answers

UNSAID = {"query_pre_attn_scalar": 16}
"""Fields that no metadata says: here they have the value that the size of a head implies."""

FILES = {
    **{
        name: CASES[name]
        for name in (
            *("rope linear", "rope yarn", "qwen2", "llama, all biases", "smollm3", "olmo2"),
            *("olmo2, untied", "granite", "granite, untied", "phi3", "phi3, partial longrope"),
            *("glm4", "glm4, whole heads", "mixtral", "mixtral, window", "qwen3 moe", "gpt-oss"),
        )
    },
    "gemma2": Case("gemma2", {"sliding_window": 20, **UNSAID}),
    "gemma2, small caps": Case(
        "gemma2",
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "num_hidden_layers": 4}
        | {"sliding_window": 9, "head_dim": 16, **UNSAID},
    ),
    "gemma3": Case("gemma3_text", {"sliding_window": 20, "num_hidden_layers": 7, **UNSAID}),
    "gemma3, linear rope": Case(
        "gemma3_text", CASES["gemma3, linear rope"].config | UNSAID | {"tie_word_embeddings": True}
    ),
    "gpt-oss, one kind of layer": Case(
        "gpt_oss", CASES["gpt-oss, one kind of layer"].config | {"swiglu_limit": 7.0}
    ),
}
WIDE = {"hidden_size": 256, "head_dim": 64, "vocab_size": 390, "num_experts_per_tok": 3}
THREE = WIDE | {"num_local_experts": 3, "intermediate_size": 256}
QWEN3 = WIDE | {"num_experts": 3, "moe_intermediate_size": 256, "norm_topk_prob": True}
EXPERTS = {
    "mixtral": Case("mixtral", THREE),
    "qwen3 moe": Case("qwen3_moe", QWEN3),
    "gpt-oss": Case("gpt_oss", THREE),
}
"""Shapes for blocks of 256. All experts compute each token, so that no rounding chooses others."""


def made(directory: Path, case: Case) -> Path:
    """A checkpoint with a tokenizer."""
    make_checkpoint(directory, vocab_size=case.config.get("vocab_size", 389))
    return make(directory, case)


def pattern_of(case: Case) -> Callable[[Metadata], object]:
    """Say which layers have a window, if they are not those of the family."""
    flags = [kind == "sliding_attention" for kind in case.config.get("layer_types", ())]
    name = ARCHITECTURES.get(case.model_type, case.model_type)
    return setting({f"{name}.attention.sliding_window_pattern": flags} if flags else {})


def setting(values: Metadata) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.update(values)


def in_tensors(part: str, kind: str, others: str = "BF16") -> Callable[[str], str]:
    """The type of the tensors whose names contain `part`, and of the others."""
    return lambda tensor: kind if part in tensor else others


def decoded(path: Path, case: Case, backend: str = "cpu") -> list[Trial]:
    recording = RecordingRunner(path, 16, 60, backend, context=case.context)
    trials = [recording.place(random_prompt(length, seed=length)) for length in case.lengths]
    recording.decode_all(trials, chunk=64, late=1)
    return trials


def assert_answers(trials: list[Trial], oracle: Oracle) -> None:
    for trial in trials:
        answer = oracle.answer(trial.prompt)
        assert trial.new_tokens == answer.token_ids
        torch.testing.assert_close(torch.stack(trial.logits), answer.logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", FILES)
def test_file_is_the_same_model(tmp_path: Path, name: str) -> None:
    """The metadata give the config.json's configuration, and tokens are transformers'."""
    case, path = FILES[name], tmp_path / "model.gguf"
    plain = made(tmp_path / "plain", case)
    write_gguf(plain, path, change=pattern_of(case))
    ours, theirs = read_model_config(path), read_model_config(plain)
    for field in fields(ModelConfig):
        if field.name not in ("family", "eos_token_ids", "ropes"):  # the tokenizer says the ends
            found, expected = getattr(ours, field.name), getattr(theirs, field.name)
            is_number = isinstance(expected, float)  # fp32 in the file
            assert found == (pytest.approx(expected, rel=1e-6) if is_number else expected), field
    assert_answers(decoded(path, case), Oracle(plain))


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "gpt-oss"])
def test_reference_backend_reads_experts_too(tmp_path: Path, name: str) -> None:
    case, path = FILES[name], tmp_path / "model.gguf"
    plain = made(tmp_path / "plain", case)
    write_gguf(plain, path)
    assert_answers(decoded(path, case, "reference"), Oracle(plain))


@pytest.mark.parametrize("kind", ["F16", "BF16", "MXFP4"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_exact_types_give_the_tokens_of_their_values(
    tmp_path: Path, name: str, kind: str
) -> None:
    case, path = EXPERTS[name], tmp_path / "model.gguf"
    plain = made(tmp_path / "plain", case)
    exact = write_gguf(plain, path, in_tensors("exps", kind, "F32"))
    twin = write_twin(plain, tmp_path / "twin", exact)
    assert_answers(decoded(path, case), Oracle(twin))
    assert read_model_config(path).quantization is None


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("name", EXPERTS)
def test_answers_of_quantized_experts_are_those_of_their_values(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = tmp_path / "model.gguf"
    plain = made(tmp_path / "plain", EXPERTS[name])
    exact = write_gguf(plain, path, in_tensors("blk.", kind, "F32"))
    kinds = kinds_of(path)
    assert {kinds["0.experts.2.gate_up"], kinds["1.experts.0.down"]} == {
        {"Q8_0": "int8", "Q6_K": "int8-16"}.get(kind, "int4-32")
    }
    assert kinds["0.experts.router"] == "float32"
    compare_answers(path, write_twin(plain, tmp_path / "twin", exact), 0.1)


def kinds_of(path: Path, quantize: Any = None) -> dict[str, str]:
    config = read_model_config(path)
    weights = load_weights(path, config)
    return dict(section_kinds(list(all_sections(config)), weights, torch.bfloat16, quantize))


def test_mxfp4_beside_8_bits_is_quantized_on_request(tmp_path: Path) -> None:
    """As gpt-oss is published: attention in Q8_0, experts in MXFP4."""
    path = tmp_path / "model.gguf"
    plain = made(tmp_path / "plain", EXPERTS["gpt-oss"])
    write_gguf(plain, path, in_tensors("exps", "MXFP4", "Q8_0"))
    found = kinds_of(path)
    assert (found["0.qkv"], found["0.experts.1.down"]) == ("int8", "bfloat16")
    found = kinds_of(path, "int8")
    assert {kind for name, kind in found.items() if "router" not in name} == {"int8"}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3 moe", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_weights_from_the_file(
    tmp_path: Path, name: str, kind: str
) -> None:
    """transformers maps names, order and norms itself, and decodes what it has read."""
    case, path = FILES[name], tmp_path / "model.gguf"
    wide = {"intermediate_size": 96, "moe_intermediate_size": 32}
    plain = made(tmp_path / "plain", Case(case.model_type, {**case.config, **wide}))
    write_gguf(plain, path, lambda tensor: kind, change=pattern_of(case))
    config = AutoConfig.from_pretrained(plain)
    oracle = Oracle(tmp_path, gguf_file=path.name, config=config)
    if kind == "F32":
        assert_answers(decoded(path, case), oracle)
    else:
        compare_answers(path, oracle, 0.2)


def test_model_in_several_files_is_the_same_model(tmp_path: Path) -> None:
    """The `gguf` package divides the tensors. The directory, and the first file, mean them all."""
    case = FILES["mixtral"]
    plain = made(tmp_path / "plain", case)
    (tmp_path / "split").mkdir()
    write_gguf(plain, tmp_path / "split" / "model.gguf", tensors_per_file=9)
    parts = sorted((tmp_path / "split").glob("*"))
    assert [part.name for part in parts] == [f"model-0000{i}-of-00004.gguf" for i in range(1, 5)]
    assert weight_files(tmp_path / "split") == tuple(parts)
    for model in (tmp_path / "split", parts[0]):
        assert_answers(decoded(model, case), Oracle(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[2].unlink(), "model-00003-of-00004.gguf: not a readable GGUF file"),
        (lambda parts: parts[3].write_bytes(parts[2].read_bytes()), "split.no: 2, but by its name"),
        (lambda parts: parts[0].rename(parts[0].with_name("a.gguf")), "split.count: 4; then the"),
        (
            lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-9]),
            "model-00002-of-00004.gguf: not a readable GGUF file: the file ends within tensor",
        ),
    ],
)
def test_part_that_is_missing_or_wrong_is_named(
    tmp_path: Path, change: Callable[[list[Path]], object], message: str
) -> None:
    write_gguf(
        made(tmp_path / "plain", FILES["mixtral"]), tmp_path / "model.gguf", tensors_per_file=9
    )
    parts = sorted(tmp_path.glob("*.gguf"))
    with pytest.raises(StartupError, match=r"part 2 of 4; name model-00001-of-00004\.gguf"):
        read_model_config(parts[1])
    change(parts)
    first = next(path for path in (tmp_path / "a.gguf", parts[0]) if path.exists())
    with pytest.raises(StartupError) as error:
        check_weights(first)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpt-oss.attention.sliding_window": None}, "attention.sliding_window: missing"),
        ({"gpt-oss.expert_used_count": 9}, "expert_used_count: 9 of 6 experts"),
        ({"gpt-oss.expert_count": 7}, "ffn_gate_inp.weight: shape [6, 64], but metadata makes it"),
        ({"gpt-oss.expert_gating_func": 2}, "expert_gating_func: 2 is not supported"),
        ({"gpt-oss.expert_weights_scale": 2.5}, "expert_weights_scale: 2.5: Quire does not know"),
        ({"gpt-oss.expert_feed_forward_length": 60}, "shape [6, 100, 64], but metadata makes it"),
        ({"gpt-oss.rope.freq_base": 1.0}, "rope.freq_base: 1.0 is not above 1"),
    ],
)
def test_wrong_metadata_of_experts_are_named(
    tmp_path: Path, change: Metadata, message: str
) -> None:
    plain = made(tmp_path / "plain", FILES["gpt-oss"])
    path = tmp_path / "model.gguf"
    write_gguf(plain, path, change=setting(change))
    with pytest.raises(StartupError) as error:
        check_weights(path)
    assert message in str(error.value)


def test_broken_files_of_experts_raise_no_other_error(tmp_path: Path) -> None:
    """A file cut anywhere is refused; with a wrong bit in its header it is refused or read."""
    plain, path = made(tmp_path / "plain", EXPERTS["gpt-oss"]), tmp_path / "model.gguf"
    write_gguf(plain, path, in_tensors("exps", "MXFP4", "Q8_0"))
    content = path.read_bytes()
    header = gguf.GGUFReader(path).tensors[0].data_offset
    rng = np.random.default_rng(0)
    for size in rng.integers(0, len(content), 15):
        path.write_bytes(content[:size])
        with pytest.raises(StartupError):
            load_weights(path, read_model_config(path))
    path.write_bytes(content)
    assert number_refused(path, header) > 50


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_gemma_are_scaled_by_hidden_size_and_heads(
    tmp_path: Path, name: str, num_layers: int
) -> None:
    path = tmp_path / "model.gguf"
    plain = made(tmp_path / "plain", FILES[name])
    scales = []
    for number in (num_layers - 1, num_layers):
        change: Metadata = {f"{name}.block_count": number, f"{name}.attention.key_length": 32}
        change[f"{name}.attention.value_length"] = change[f"{name}.rope.dimension_count"] = 32
        write_gguf(plain, path, change=setting(change))
        scales.append(read_model_config(path).attention_scale)
    assert scales == [32**-0.5, 16**-0.5]


def test_planned_memory_is_that_of_the_served_kinds(tmp_path: Path) -> None:
    """MXFP4 has two bytes for each value; with scales and zero points, 8 bits 17/16 and 4 bits
    5/8."""
    plain = made(tmp_path / "plain", EXPERTS["gpt-oss"])
    path = tmp_path / "model.gguf"
    kinds = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "Q8_0", "ffn_down_exps": "Q4_0"}
    sizes = {}
    for name, kind in kinds.items():
        write_gguf(plain, path, in_tensors(name, kind))
        sizes[name] = served_bytes(GgufFile.read(path), 2, dequantized=False)
    values = 3 * 3 * 256 * 256  # in 3 layers of 3 experts
    full = sizes["ffn_gate_exps"]
    assert (sizes["ffn_up_exps"], sizes["ffn_down_exps"]) == (
        full - 15 / 16 * values,
        full - 1.375 * values,
    )


def test_sampling_that_a_file_recommends_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    more: Metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    plain = made(tmp_path / "plain", FILES["qwen2"])
    write_gguf(plain, path, change=setting(more))
    found = read_model_config(path).generation
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 20, None)
