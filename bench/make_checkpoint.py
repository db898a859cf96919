"""Checkpoints with random weights in Hugging Face's format, of any shape of the families.

    python -m bench.make_checkpoint /tmp/tiny
    python -m bench.make_checkpoint /tmp/like-0.6b --shape 0.6b --shards 2
    python -m bench.make_checkpoint /tmp/other --shape small --family llama --num-layers 4

The same arguments give the same bytes. Weights are scaled so that greedy decoding wanders through
the vocabulary instead of repeating one token: sublayers say much more than the embedding does.
With `--embedding-std 20 --no-tied` it is the other way round: the next token follows from the last
one alone, and greedy decoding soon goes round in a loop, as a text that repeats itself.
"""

import argparse
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.harness import add_option

Family = Literal["qwen3", "qwen3_moe", "qwen2", "llama", "mistral"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS_TOKEN_IDS = (258, 256)  # <|im_end|>, <|endoftext|>: special tokens come after 256 bytes
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
_LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """The default is the smallest thing that has every feature: grouped queries, tied embeddings.

    `rope_scaling` is config.json's object of that name. `attention_bias` is for llama and qwen3;
    qwen2 always has biases, mistral none. `sliding_window` is for all layers of mistral, for the
    second half of the layers of qwen2 and qwen3; 0: none. `shards` > 1 writes an index and so many
    files. A layer of qwen3_moe has `num_experts` of `intermediate_size`, and a token uses
    `experts_per_token` of them; other families have none.
    """

    family: Family = "qwen3"
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    num_experts: int = 0
    experts_per_token: int = 0
    vocab_size: int = 384
    max_position_embeddings: int = 4096
    tied: bool = True
    attention_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 0
    embedding_std: float = 0.03  # far below what sublayers add, which is about 1 each
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    shards: int = 1
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """Differs where any field does."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


_SMALL = CheckpointSpec(
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=8192,
    max_position_embeddings=8192,
    rope_theta=1_000_000.0,
    dtype="bfloat16",
)
_MEDIUM = replace(_SMALL, hidden_size=1024, num_heads=16, num_kv_heads=8, intermediate_size=3072)
SHAPES = {
    "tiny": CheckpointSpec(),
    # overhead shows: a step of one stream is 1 ms of arithmetic
    "small": _SMALL,
    # 103 million parameters in its layers: a step of one stream reads 0.2 GB
    "medium": _MEDIUM,
    # Qwen3-0.6B
    "0.6b": replace(_MEDIUM, num_layers=28, head_dim=128, vocab_size=151_936),
    # Qwen3-8B
    "8b": replace(
        _MEDIUM,
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        head_dim=128,
        intermediate_size=12_288,
        vocab_size=151_936,
        tied=False,
        shards=9,
    ),
    # four of the 48 layers of Qwen3-30B-A3B
    "30b-a3b-4-layers": replace(
        _MEDIUM,
        family="qwen3_moe",
        num_layers=4,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=768,
        num_experts=128,
        experts_per_token=8,
        vocab_size=151_936,
        tied=False,
        shards=5,
    ),
}


def make_checkpoint(
    directory: Path | str, spec: CheckpointSpec | None = None, **overrides: Any
) -> Path:
    """Write a checkpoint and return its directory; `overrides` are fields of `CheckpointSpec`.

    ValueError: a family or shape that cannot be.
    """
    spec = replace(spec or CheckpointSpec(), **overrides)
    _check(spec)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(spec))
    _write_json(directory / "generation_config.json", {"eos_token_id": list(_EOS_TOKEN_IDS)})
    _write_tokenizer(directory, spec)
    _write_weights(directory, spec)
    return directory


def _check(spec: CheckpointSpec) -> None:
    if spec.family not in _ARCHITECTURES:
        raise ValueError(f"family {spec.family!r} is none of {', '.join(_ARCHITECTURES)}")
    if (spec.family == "qwen3_moe") != (0 < spec.experts_per_token <= spec.num_experts):
        raise ValueError(
            f"{spec.experts_per_token} of {spec.num_experts} experts a token in {spec.family}"
        )
    if spec.vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {spec.vocab_size} is below {MIN_VOCAB_SIZE}")
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"{spec.num_kv_heads} kv heads do not divide {spec.num_heads} heads")
    if spec.head_dim % 2:
        raise ValueError(f"head_dim {spec.head_dim} is odd")
    if not 1 <= spec.shards <= spec.num_layers + 1:
        raise ValueError(f"shards {spec.shards} is not in 1 .. num_layers + 1")


def _config(spec: CheckpointSpec) -> dict[str, Any]:
    experts = {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.intermediate_size,
        "norm_topk_prob": True,
    }
    return {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.attention_bias,
        "sliding_window": spec.sliding_window or None,
        "use_sliding_window": spec.sliding_window > 0 and spec.family in ("qwen2", "qwen3"),
        "max_window_layers": (spec.num_layers + 1) // 2,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": _EOS_TOKEN_IDS[0],
        "torch_dtype": spec.dtype,
        **(experts if spec.num_experts else {}),
    }


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor to draw: normal(mean, std)."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[_Weight]:
    yield _Weight(f"{name}.weight", (rows, columns), 1.0 / math.sqrt(columns))
    if bias:
        yield _Weight(f"{name}.bias", (rows,), 0.2)


def _norm(name: str, size: int, mean: float = 1.0) -> _Weight:
    return _Weight(f"{name}.weight", (size,), 0.2 * mean, mean)


def _embedding_group(spec: CheckpointSpec) -> Iterator[_Weight]:
    """Embedding, final norm and head; the final norm is set so that logits have `_LOGIT_STD`."""
    head_std = spec.embedding_std if spec.tied else 1.0 / math.sqrt(spec.hidden_size)
    gain = _LOGIT_STD / (head_std * math.sqrt(spec.hidden_size))
    shape = (spec.vocab_size, spec.hidden_size)
    yield _Weight("model.embed_tokens.weight", shape, spec.embedding_std)
    yield _norm("model.norm", spec.hidden_size, gain)
    if not spec.tied:
        yield _Weight("lm_head.weight", shape, head_std)


def _layer_group(spec: CheckpointSpec, layer: int) -> Iterator[_Weight]:
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    o_bias = spec.family in ("qwen3", "llama") and spec.attention_bias
    qkv_bias = spec.family == "qwen2" or o_bias
    yield _norm(f"{prefix}.input_layernorm", spec.hidden_size)
    yield _norm(f"{prefix}.post_attention_layernorm", spec.hidden_size)
    yield from _linear(f"{attention}.q_proj", q_size, spec.hidden_size, qkv_bias)
    yield from _linear(f"{attention}.k_proj", kv_size, spec.hidden_size, qkv_bias)
    yield from _linear(f"{attention}.v_proj", kv_size, spec.hidden_size, qkv_bias)
    yield from _linear(f"{attention}.o_proj", spec.hidden_size, q_size, o_bias)
    if spec.family in ("qwen3", "qwen3_moe"):
        yield _norm(f"{attention}.q_norm", spec.head_dim)
        yield _norm(f"{attention}.k_norm", spec.head_dim)
    if spec.num_experts:
        yield from _linear(f"{prefix}.mlp.gate", spec.num_experts, spec.hidden_size)
        for expert in range(spec.num_experts):
            yield from _gated(spec, f"{prefix}.mlp.experts.{expert}")
    else:
        yield from _gated(spec, f"{prefix}.mlp")


def _gated(spec: CheckpointSpec, name: str) -> Iterator[_Weight]:
    yield from _linear(f"{name}.gate_proj", spec.intermediate_size, spec.hidden_size)
    yield from _linear(f"{name}.up_proj", spec.intermediate_size, spec.hidden_size)
    yield from _linear(f"{name}.down_proj", spec.hidden_size, spec.intermediate_size)


def _groups(spec: CheckpointSpec) -> list[list[_Weight]]:
    """Tensors that one shard must hold whole: the embedding's tensors, then each layer's."""
    layers = (list(_layer_group(spec, layer)) for layer in range(spec.num_layers))
    return [list(_embedding_group(spec)), *layers]


def _draw(weight: _Weight, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(weight.shape, generator=generator).mul_(weight.std).add_(weight.mean)


def _write_weights(directory: Path, spec: CheckpointSpec) -> None:
    """One shard in memory at a time. Every tensor has its own seed, so shards change nothing."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    groups = _groups(spec)
    seeds = itertools.count(spec.seed * 1_000_003)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for shard in range(spec.shards):
        of_shard = groups[
            shard * len(groups) // spec.shards : (shard + 1) * len(groups) // spec.shards
        ]
        tensors = {w.name: _draw(w, next(seeds)).to(dtype) for group in of_shard for w in group}
        name = _shard_name(shard, spec.shards)
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if spec.shards > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)


def _shard_name(shard: int, shards: int) -> str:
    if shards == 1:
        return "model.safetensors"
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens: bytes, special tokens, then every string over
    the space and the letters, the more frequent letters first, shorter strings first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    merges: list[tuple[str, str]] = []
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    stems: list[str] = ["Ġ", *letters]  # Ġ is byte-level BPE's space
    while len(vocab) < vocab_size:
        pairs = list(itertools.islice(itertools.product(stems, letters), vocab_size - len(vocab)))
        merges += pairs
        stems = [stem + letter for stem, letter in pairs]
        vocab |= {stem: len(vocab) + i for i, stem in enumerate(stems)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _write_tokenizer(directory: Path, spec: CheckpointSpec) -> None:
    _tokenizer(spec.vocab_size).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Every field of `CheckpointSpec` is an option; `--shape` sets what they are by default."""
    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--shape", choices=list(SHAPES), default="tiny")
    chosen, _ = shape.parse_known_args()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, parents=[shape]
    )
    parser.add_argument("directory", type=Path)
    hints = {**get_type_hints(CheckpointSpec), "rope_scaling": json.loads}
    for field in fields(CheckpointSpec):
        add_option(parser, field, hints[field.name], getattr(SHAPES[chosen.shape], field.name))
    options = vars(parser.parse_args())
    del options["shape"]
    print(make_checkpoint(options.pop("directory"), **options))


if __name__ == "__main__":
    main()
