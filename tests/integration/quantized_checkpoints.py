"""Writes quantized checkpoints from random codes, and beside each a twin with the same weights,
dequantized. The packing follows each format's description, output by output and input by input, not
the code that reads it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvops import int4, int8
from services.model.config.quantization import Quantization

from .models_oracle import NUM_NEW_TOKENS, Oracle, RecordingRunner, random_prompt

FILE = "model.safetensors"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A quantized linear: its tensors by the last part of their names, and its weights, fp64."""

    tensors: dict[str, Tensor]
    weight: Tensor


Encode = Callable[[Tensor, torch.Generator], Encoded]
"""Quantizes weights [N, K]."""


@dataclass(frozen=True, slots=True)
class Scheme:
    config: dict[str, Any]
    encode: Encode


def write_quantized(
    plain: Path, directory: Path, scheme: Scheme, skip: tuple[str, ...] = ()
) -> Path:
    """Quantize the linears of a plain checkpoint, except those whose name contains one of `skip`.
    Writes `directory`, and `directory`-twin in fp32. Returns the twin."""
    twin = directory.with_name(f"{directory.name}-twin")
    for copy in (directory, twin):
        shutil.copytree(plain, copy)
    generator = torch.Generator().manual_seed(5)
    tensors, dense = load_file(plain / FILE), {}
    for name, tensor in list(tensors.items()):
        dense[name] = tensor.float()
        if not name.endswith("_proj.weight") or any(part in name for part in skip):
            continue
        encoded = scheme.encode(tensor.float(), generator)
        del tensors[name]
        linear = name.removesuffix(".weight")
        tensors |= {f"{linear}.{part}": t.contiguous() for part, t in encoded.tensors.items()}
        dense[name] = encoded.weight.float()
    save_file(tensors, directory / FILE)
    save_file(dense, twin / FILE)
    for copy, change in (
        (directory, {"quantization_config": scheme.config}),
        (twin, {"torch_dtype": "float32"}),
    ):
        config = json.loads((copy / "config.json").read_text()) | change
        (copy / "config.json").write_text(json.dumps(config))
    return twin


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[..., 8 * n] codes of 4 bits -> int32 [..., n]; code order[i] has bits 4 i to 4 i + 3."""
    eights = codes.long().reshape(*codes.shape[:-1], -1, 8)
    word = sum(eights[..., place] * 16**i for i, place in enumerate(order))
    assert isinstance(word, Tensor)
    return torch.where(word < 2**31, word, word - 2**32).int()


def _grouped(
    weight: Tensor,
    group: int,
    generator: torch.Generator,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K], scales and zero points [N, K / group], and the weights that they stand for."""
    n, k = weight.shape
    values = weight.view(n, k // group, group)
    scales = (values.abs().amax(2) / 7.5).to(scale_dtype)
    zeros = torch.full((n, k // group), 8)
    if not symmetric:
        zeros = torch.randint(5, 12, zeros.shape, generator=generator)
    wide = scales.double()[:, :, None]
    codes = (values.double() / wide + zeros[:, :, None]).round().clamp(0, 15)
    exact = wide * (codes - zeros[:, :, None])
    return codes.view(n, k).long(), scales, zeros, exact.view(n, k)


def gptq(group: int, symmetric: bool, version: str = "gptq") -> Scheme:
    def encode(weight: Tensor, generator: torch.Generator) -> Encoded:
        codes, scales, zeros, exact = _grouped(weight, group, generator, symmetric, torch.float16)
        stored_zeros = zeros - 1 if version == "gptq" else zeros
        tensors = {
            "qweight": words(codes).T,
            "qzeros": words(stored_zeros.T),
            "scales": scales.T,
            "g_idx": torch.arange(weight.shape[1]).int() // group,
        }
        return Encoded(tensors, exact)

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric}
    return Scheme({**config, "desc_act": False, "checkpoint_format": version}, encode)


def awq(group: int) -> Scheme:
    def encode(weight: Tensor, generator: torch.Generator) -> Encoded:
        codes, scales, zeros, exact = _grouped(weight, group, generator, False, torch.float16)
        tensors = {
            "qweight": words(codes.T, _AWQ_ORDER),
            "qzeros": words(zeros.T, _AWQ_ORDER),
            "scales": scales.T,
        }
        return Encoded(tensors, exact)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Scheme({**config, "zero_point": True}, encode)


def pack_quantized(group: int, symmetric: bool) -> Scheme:
    def encode(weight: Tensor, generator: torch.Generator) -> Encoded:
        codes, scales, zeros, exact = _grouped(weight, group, generator, symmetric, torch.bfloat16)
        tensors = {
            "weight_packed": words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T).T
        return Encoded(tensors, exact)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    return _compressed("pack-quantized", {**weights, "symmetric": symmetric}, None, encode)


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, encode: Encode
) -> Scheme:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return Scheme({**config, "config_groups": {"group_0": group}}, encode)


def int_quantized() -> Scheme:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    return _compressed("int-quantized", weights, inputs, _int8)


def float_quantized() -> Scheme:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = weights | {"strategy": "token", "dynamic": True}
    return _compressed("float-quantized", weights, inputs, _fp8_channel)


def _int8(weight: Tensor, generator: torch.Generator) -> Encoded:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return Encoded({"weight": codes, "weight_scale": scales}, scales.double() * codes.double())


def _fp8_channel(weight: Tensor, generator: torch.Generator) -> Encoded:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    exact = (codes.float() * scales).bfloat16().double()
    return Encoded({"weight": codes, "weight_scale": scales}, exact)


def fp8_tensor() -> Scheme:
    def encode(weight: Tensor, generator: torch.Generator) -> Encoded:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
        return Encoded(tensors, (codes.float() * scale).bfloat16().double())

    return Scheme({"quant_method": "fp8", "activation_scheme": "static"}, encode)


def fp8_block() -> Scheme:
    def encode(weight: Tensor, generator: torch.Generator) -> Encoded:
        n, k = weight.shape
        scales = torch.empty(-(-n // 128), -(-k // 128))
        codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
        exact = torch.empty(n, k, dtype=torch.float64)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scales[i, j] = weight[block].abs().max() / 448
                codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                exact[block] = (codes[block].float() * scales[i, j]).bfloat16().double()
        return Encoded({"weight": codes, "weight_scale_inv": scales}, exact)

    return Scheme({"quant_method": "fp8", "weight_block_size": [128, 128]}, encode)


def dequantized(directory: Path, copy: Path, quantize: Quantization) -> Path:
    """A copy of the checkpoint whose linears have the values of their int8 or int4 weights."""
    shutil.copytree(directory, copy)
    tensors = load_file(copy / FILE)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            found = int8.quantize(tensor) if quantize == "int8" else int4.quantize(tensor, 64)
            tensors[name] = found.dequantized().contiguous()
    save_file(tensors, copy / FILE, {"format": "pt"})
    return copy


def compare_answers(
    quantized: Path, twin: Path | Oracle, bound: float, backend: str = "cpu"
) -> None:
    """Decode some prompts with both. Logits differ by at most `bound`, as a share of their spread
    (root mean square over all). Tokens are equal where the oracle's margin exceeds four times the
    error of its logits."""
    oracle = Oracle(twin) if isinstance(twin, Path) else twin
    recording = RecordingRunner(quantized, 16, 64, backend, torch.bfloat16)
    trials = [recording.place(random_prompt(length, seed=1)) for length in (1, 9, 40, 100)]
    recording.decode_all(trials, chunk=32)
    errors = []
    for trial in trials:
        answer = oracle.answer(trial.prompt)
        for step in range(NUM_NEW_TOKENS):
            found, exact = trial.logits[step], answer.logits[step]
            error = (found - exact).square().mean().sqrt()
            errors.append(error / exact.std())
            if trial.new_tokens[step] != answer.token_ids[step]:
                best = exact.topk(2).values
                assert best[0] - best[1] < 4 * error
                break  # From here on the sequences differ.
    assert len(errors) > 2 * len(trials)
    assert torch.stack(errors).square().mean().sqrt() < bound
