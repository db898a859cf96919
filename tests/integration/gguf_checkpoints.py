"""Writes GGUF files from plain checkpoints, as llama.cpp's converter does."""

import json
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

Choose = Callable[[str], str]
"""Chooses the type of a linear or of the embedding, by its name in GGUF."""

Metadata = dict[str, Any]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_K_BLOCKS = {"Q4_K": (144, [0, 2]), "Q5_K": (176, [0, 2]), "Q6_K": (210, [208])}
"""The bytes of a block of 256 values, and the places of its fp16 scales."""


def gguf_name(name: str) -> str:
    stem, _, part = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{part}"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.{part}"


def write_gguf(
    plain: Path,
    path: Path,
    choose: Choose = lambda name: "F32",
    change: Callable[[Metadata], object] = lambda _: None,
    more: dict[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, torch.Tensor]:
    """Write `path`. Returns the weights by Hugging Face's names. `change`: a change of the
    metadata. `more`: more tensors, fp32."""
    config = json.loads((plain / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    metadata = _metadata(config, architecture) | _tokenizer(plain)
    change(metadata)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        _add(writer, name, value)
    stands_for: dict[str, Any] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        values = tensor.float().numpy()
        permuted = architecture == "llama" and (".q_proj." in name or ".k_proj." in name)
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        if permuted:
            values = _pairs(values, heads)
        kind = Type[choose(gguf_name(name)) if values.ndim == 2 else "F32"]
        raw = _quantized(values, kind, seed=len(stands_for))
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        exact = gguf.dequantize(raw, kind).reshape(values.shape)
        stands_for[name] = torch.from_numpy(_halves(exact, heads) if permuted else exact.copy())
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def write_twin(plain: Path, directory: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write the plain checkpoint with other weights, fp32."""
    shutil.copytree(plain, directory)
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _metadata(config: dict[str, Any], architecture: str) -> Metadata:
    values: Metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    return {f"{architecture}.{name}": value for name, value in values.items()}


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
    """The gguf package quantizes only to the simple types. Blocks of 256 are random bytes, with
    scales that give weights of the same size."""
    if kind.name not in _K_BLOCKS:
        return np.asarray(gguf.quantize(values, kind))
    num_bytes, places = _K_BLOCKS[kind.name]
    rows, columns = values.shape
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // 256, num_bytes), dtype=np.uint8)
    for place in places:
        scales = random.uniform(0.5, 1.0, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[:, :, None].view(np.uint8)
    if len(places) == 2:  # so that the mean is about 0: half of the codes times the scales
        half = blocks[:, :, :2].copy().view(np.float16) * (7.5 if kind == Type.Q4_K else 15.5)
        blocks[:, :, 2:4] = half.astype(np.float16).view(np.uint8)
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
