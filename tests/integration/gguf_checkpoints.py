"""Writes GGUF files from plain checkpoints, as llama.cpp's converter does."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from bench.make_checkpoint import CHAT_TEMPLATE
from services.engine.weights.checkpoint import load_weights
from services.model.checkpoint.reading import read_model_config
from services.runtime.errors import StartupError

Choose = Callable[[str], str]
"""Chooses the type of a linear or of the embedding, by its name in GGUF."""

Metadata = dict[str, Any]

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
}
"""Names of architectures in GGUF, where they differ from `model_type`."""

_ENUMS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
_WITH_PAIRS = ("llama", "granite", "smollm3")
_WITH_WINDOWS = ("llama", "phi3", "gpt-oss", "gemma2", "gemma3")
_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_used_count": "num_experts_per_tok",
}
"""Fields of config.json that the converter writes if they are there and not 0."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_MERGED = {
    **{w: f"layers.{{}}.feed_forward.experts.{w}.weight" for w in ("w1", "w2", "w3")},
    **{
        linear: f"model.layers.{{}}.mlp.experts.{linear}.weight"
        for linear in ("gate_proj", "up_proj", "down_proj")
    },
}
"""How the converter calls the tensors of all experts, by a linear of one expert."""

_SCALES = {
    **{"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]},
    **{"IQ4_NL": [0], "IQ4_XS": [0], "IQ3_S": [0], "IQ3_XXS": [0]},
    **{"IQ2_S": [0], "IQ2_XS": [0], "IQ2_XXS": [0]},
}
"""The places of a block's fp16 scale, and of its fp16 minimum."""

_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Half of the largest code, of types that have a minimum too."""


def write_gguf(
    plain: Path,
    path: Path,
    choose: Choose = lambda name: "F32",
    change: Callable[[Metadata], object] = lambda _: None,
    more: dict[str, np.ndarray[Any, Any]] | None = None,
    tensors_per_file: int = 0,
) -> dict[str, torch.Tensor]:
    """Write `path`. Returns the weights by Hugging Face's names. `change`: a change of the
    metadata. `more`: more tensors, fp32. `tensors_per_file`: write several files; 0: one."""
    config = json.loads((plain / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    metadata = _metadata(config, architecture) | _tokenizer(plain)
    change(metadata)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    for name, value in metadata.items():
        _add(writer, name, value)
    names = gguf.get_tensor_name_map(_ENUMS[architecture], config["num_hidden_layers"])
    stands_for: dict[str, np.ndarray[Any, Any]] = {}
    for name, values in _converted(plain, config, architecture).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        gguf_name += "" if gguf_name.endswith((".weight", ".bias")) else ".weight"  # of sinks
        is_chosen = gguf_name.endswith(".weight") and "norm" not in gguf_name and values.ndim > 1
        kind = Type[choose(gguf_name) if is_chosen and "gate_inp" not in gguf_name else "F32"]
        raw = _quantized(values, kind, seed=len(stands_for))
        writer.add_tensor(gguf_name, raw, raw_dtype=kind)
        stands_for[name] = gguf.dequantize(raw, kind).reshape(values.shape)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _as_stored(stands_for, config, architecture)


def write_twin(plain: Path, directory: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write the plain checkpoint with other weights, fp32."""
    shutil.copytree(plain, directory)
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def number_refused(path: Path, header_bytes: int) -> int:
    """How many of 200 copies with one wrong bit in the header are refused. The others are read: no
    error but StartupError is raised."""
    content, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for place in rng.integers(4, header_bytes, 200):
        broken = bytearray(content)
        broken[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            load_weights(path, read_model_config(path))
        except StartupError:
            refused += 1
    return refused


def _metadata(config: dict[str, Any], architecture: str) -> Metadata:
    """The metadata that the converter writes for this config.json."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    values: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("rope_theta", config.get("rope_theta")),
        "rope.dimension_count": int(head_dim * part),
        "vocab_size": config["vocab_size"],
    }
    for name, field in _FIELDS.items():
        if config.get(field):
            values[name] = config[field]
    if rope.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = rope["factor"]
    original = rope.get("original_max_position_embeddings")
    if original and rope.get("rope_type") in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = original
    if "num_experts_per_tok" in config:
        values["expert_count"] = config.get("num_local_experts") or config["num_experts"]
    match architecture:
        case "qwen3moe":
            values["expert_feed_forward_length"] = config["moe_intermediate_size"]
        case "gpt-oss":
            values["expert_feed_forward_length"] = config["intermediate_size"]
            for name in ("beta_fast", "beta_slow"):
                if name in rope:
                    values[f"rope.scaling.yarn_{name}"] = rope[name]
        case "phi3" if "short_factor" in rope:
            scale = config["max_position_embeddings"] / original
            factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            values["rope.scaling.attn_factor"] = factor
        case "gemma3":
            local = config["rope_parameters"]["sliding_attention"]
            values["rope.freq_base_swa"] = local["rope_theta"]
    if architecture not in _WITH_WINDOWS:
        values.pop("attention.sliding_window", None)
    return {f"{architecture}.{name}": value for name, value in values.items()}


def _converted(
    plain: Path, config: dict[str, Any], architecture: str
) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors as the converter stores them, by names that the `gguf` package maps."""
    rope = config.get("rope_parameters") or {}
    found: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        values = tensor.float().numpy()
        if name.endswith("norm.weight") and architecture.startswith("gemma"):
            values = values + 1
        if (heads := _heads(name, config, architecture)) is not None:
            values = _pairs(values, heads)
        if (match := _EXPERT.fullmatch(name)) is not None:
            layer, expert, linear = match.groups()
            experts.setdefault(_MERGED[linear].format(layer), {})[int(expert)] = values
        elif "experts.gate_up_proj" in name:
            stem, part = name.rsplit(".", 1)[0], "bias" if name.endswith("_bias") else "weight"
            values = values if part == "bias" else values.swapaxes(1, 2)
            found[f"{stem}.gate_proj.{part}"] = values[:, ::2].copy()
            found[f"{stem}.up_proj.{part}"] = values[:, 1::2].copy()
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = values.swapaxes(1, 2).copy()
        elif name.endswith("experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = values
        else:
            found[name] = values
    for kind in ("long", "short") if "long_factor" in rope else ():
        found[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    for name, parts in experts.items():
        found[name] = np.stack([parts[expert] for expert in range(len(parts))])
    return found


def _as_stored(
    found: dict[str, np.ndarray[Any, Any]], config: dict[str, Any], architecture: str
) -> dict[str, torch.Tensor]:
    """The other way round: by the names and in the order of the safetensors."""
    stored: dict[str, np.ndarray[Any, Any]] = {}
    merged = {
        name.format(layer): (layer, linear)
        for linear, name in _MERGED.items()
        for layer in range(config["num_hidden_layers"])
        if architecture != "gpt-oss"  # whose checkpoints have the experts in one tensor too
    }
    for name, values in found.items():
        if name.startswith("rope_factors"):
            continue
        if name.endswith("norm.weight") and architecture.startswith("gemma"):
            values = values - 1
        if (heads := _heads(name, config, architecture)) is not None:
            values = _halves(values, heads)
        if name in merged:
            layer, linear = merged[name]
            place = f"model.layers.{layer}.{'block_sparse_moe' if linear[0] == 'w' else 'mlp'}"
            for expert, part in enumerate(values):
                stored[f"{place}.experts.{expert}.{linear}.weight"] = part
        elif name.endswith(("experts.gate_proj.weight", "experts.gate_proj.bias")):
            up = found[name.replace("gate_proj", "up_proj")]
            both = np.stack([values, up], axis=2).reshape(len(up), -1, *up.shape[2:])
            is_bias = name.endswith("bias")
            stem = name.rsplit(".", 2)[0] + ".gate_up_proj"
            stored[stem + "_bias" * is_bias] = both if is_bias else both.swapaxes(1, 2)
        elif name.endswith("experts.down_proj.weight"):
            stored[name.removesuffix(".weight")] = values.swapaxes(1, 2)
        elif name.endswith("experts.down_proj.bias"):
            stored[name.replace(".bias", "_bias")] = values
        elif ".experts.up_proj." not in name:
            stored[name] = values
    return {name: torch.from_numpy(np.array(values, order="C")) for name, values in stored.items()}


def _heads(name: str, config: dict[str, Any], architecture: str) -> int | None:
    """The heads whose rows the converter reorders; None: it does not."""
    if architecture not in _WITH_PAIRS:
        return None
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None


def _tokenizer(plain: Path) -> Metadata:
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    special = {t["content"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges or ["a b"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": vocab["<|endoftext|>"],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, name: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)


def _quantized(values: np.ndarray[Any, Any], kind: Type, seed: int) -> np.ndarray[Any, Any]:
    """The gguf package quantizes only to the simple types. Blocks of others are random bytes, with
    scales that give weights of the same size."""
    if kind.name not in _SCALES:
        return np.asarray(gguf.quantize(values, kind))
    if values.ndim == 3:
        return np.stack([_quantized(v, kind, seed + i) for i, v in enumerate(values)])
    places, (size, num_bytes) = _SCALES[kind.name], gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for place in places:
        scales = random.uniform(0.5, 1.0, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[:, :, None].view(np.uint8)
    if len(places) == 2:  # so that the mean is about 0: half of the codes times the scales
        scale, minimum = (slice(place, place + 2) for place in places)
        half = blocks[:, :, scale].copy().view(np.float16) * _MIDDLES[kind.name]
        blocks[:, :, minimum] = half.astype(np.float16).view(np.uint8)
    spread = gguf.dequantize(blocks.reshape(rows, -1), kind).std()
    for place in places:
        scales = blocks[:, :, place : place + 2].copy().view(np.float16)
        scaled = (scales * (values.std() / spread)).astype(np.float16)
        blocks[:, :, place : place + 2] = scaled.view(np.uint8)
    return blocks.reshape(rows, -1)


def _pairs(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The rows of each head in the order first, middle, second, middle + 1, ..."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _halves(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
