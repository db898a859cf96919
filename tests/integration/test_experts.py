"""Models with experts: MXFP4 weights, the packed file, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvops import Backend
from kvops.reference import ReferenceKernels
from services.engine.models import load_model
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.shards import check_shards
from services.model.checkpoint.weights import checked_weights
from services.runtime.errors import StartupError

from .family_checkpoints import CASES, Case, make
from .models_oracle import RecordingRunner, random_prompt

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor([*FP4, *(-value for value in FP4)])


class OnGpu(ReferenceKernels):
    name = "on a GPU"
    device = "cuda"


def in_mxfp4(directory: Path, twin: Path) -> None:
    """Replace a checkpoint's experts by random MXFP4 weights, and those of `twin` by their
    values."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(directory / "model.safetensors")
    values = dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (num, outputs, inputs), generator=generator)
        exponents = torch.randint(122, 126, (num, outputs, inputs // 32), generator=generator)
        scales = torch.exp2((exponents - 127).float()).repeat_interleave(32, dim=2)
        values[name] = (VALUES[codes] * scales).transpose(1, 2).contiguous()
        blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_blocks"] = blocks.view(num, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = exponents.to(torch.uint8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(values, twin / "model.safetensors", {"format": "pt"})
    edit(directory, quantization_config={"quant_method": "mxfp4"})


def edit(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


def logits(directory: Path, dtype: torch.dtype, cache: Path | None = None) -> Tensor:
    recording = RecordingRunner(directory, 16, 20, dtype=dtype, cache=cache)
    trial = recording.place(random_prompt(30, seed=1))
    recording.decode_all([trial], 4096)
    return torch.stack(trial.logits)


def test_mxfp4_weights_are_dequantized_exactly(tmp_path: Path) -> None:
    case = Case("gpt_oss", {"num_local_experts": 4, "intermediate_size": 96})
    directory, twin = (make(tmp_path / name, case) for name in ("mxfp4", "twin"))
    in_mxfp4(directory, twin)
    assert torch.equal(logits(directory, torch.float32), logits(twin, torch.float32))


def test_mxfp4_weights_stay_packed_where_kernels_take_them(tmp_path: Path) -> None:
    """A backend of GPUs has the codes and the exponents of the file, and computes what transformers
    computes with the values that they mean: the experts' biases and gates are gpt-oss's."""
    case = Case("gpt_oss", {"num_local_experts": 4, "intermediate_size": 96})
    directory, twin = (make(tmp_path / name, case) for name in ("mxfp4", "twin"))
    in_mxfp4(directory, twin)
    recording = RecordingRunner(directory, 16, 20, "reference")
    trial = recording.place(random_prompt(30, seed=1))
    recording.decode_all([trial], 4096)
    model: Any = recording.model
    stored = load_file(directory / "model.safetensors")
    for number, layer in enumerate(model.layers):
        for name, weight in (("gate_up", layer.experts.gate_up), ("down", layer.experts.down)):
            assert weight.kind == "mxfp4"
            key = f"model.layers.{number}.mlp.experts.{name}_proj"
            num_bytes = stored[f"{key}_blocks"].nbytes * weight.codes.shape[1] * 2
            assert weight.codes.nbytes == num_bytes // weight.num_inputs  # padded to chunks
            assert weight.scales.nbytes == weight.codes.nbytes // 16
    exact: Any = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    tokens = torch.tensor([[*trial.prompt, *trial.new_tokens[:-1]]])
    with torch.inference_mode():
        expected = exact(tokens).logits[0, len(trial.prompt) - 1 :]
    torch.testing.assert_close(torch.stack(trial.logits), expected, rtol=1e-4, atol=1e-4)


def test_packed_experts_are_those_of_memory(tmp_path: Path) -> None:
    """The packed file, written and then mapped, gives the bits of weights packed in memory."""
    directory = make(tmp_path / "model", CASES["qwen3 moe, some layers"])
    caches = (None, tmp_path / "cache", tmp_path / "cache")
    first, *others = [logits(directory, torch.bfloat16, cache) for cache in caches]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("qwen3 moe", {"num_experts_per_tok": 131}, "num_experts_per_tok: 131 of 130 experts"),
        ("qwen3 moe", {"mlp_only_layers": "all"}, "mlp_only_layers: 'all' is not a list"),
        ("qwen3 moe", {"shared_expert_intermediate_size": 8}, "does not know this field"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "gpt-oss only"),
        ("mixtral", {"num_local_experts": 7}, r"shape \[5, 64\], but the config"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit: 0 is not positive"),
    ],
)
def test_a_wrong_config_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], problem: str
) -> None:
    directory = make(tmp_path / "model", CASES[name])
    edit(directory, **fields)
    with pytest.raises(StartupError, match=problem):
        checked_weights(directory, read_model_config(directory))


def test_weights_of_experts_are_where_the_model_computes(tmp_path: Path) -> None:
    """Routers, biases and sinks too, in fp32 where these are computed so."""
    directory = make(tmp_path / "model", CASES["gpt-oss"])
    model: Any = load_model(directory, torch.bfloat16, Backend(OnGpu()), device="meta")
    for layer in model.layers:
        weights = layer.experts
        in_fp32 = [weights.router, weights.router_bias, layer.sinks]
        others = [weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias]
        assert {tensor.device.type for tensor in in_fp32 + others} == {"meta"}
        assert {tensor.dtype for tensor in in_fp32} == {torch.float32}


def test_experts_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    mixtral = read_model_config(make(tmp_path / "other", CASES["mixtral"]))
    mixtral = replace(mixtral, num_heads=8, num_kv_heads=8, intermediate_size=64)
    with pytest.raises(StartupError, match="36 columns of an expert"):
        check_shards(mixtral, 8)
