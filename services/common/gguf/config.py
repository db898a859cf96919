"""Makes a model's configuration from a GGUF file's metadata and tensors."""

import struct
from dataclasses import dataclass

from services.common.checkpoint.layout import EMBEDDING, FINAL_NORM, HEAD, weight_shapes
from services.common.checkpoint.quantization import StoredKind, StoredQuantization
from services.common.errors import StartupError
from services.common.gguf.file import GgufFile
from services.common.text.families import FAMILIES
from services.common.text.json_fields import JsonFields
from services.common.text.model_config import GenerationDefaults, ModelConfig
from services.common.text.rope_config import FrequencyDivisors, LinearScaling, RopeConfig

TOKENS = "tokenizer.ggml.tokens"
ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = ("F32", "F16", "BF16")
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")

_OUTSIDE_LAYERS = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    HEAD: "output.weight",
}
_IN_LAYERS = {
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


@dataclass(frozen=True, slots=True)
class _Family:
    """`pairs`: llama.cpp stores the rows of queries and keys in its own order, in which the two
    halves of a rotation are neighbours."""

    architecture: str
    pairs: bool


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", pairs=True),
    "qwen2": _Family("Qwen2ForCausalLM", pairs=False),
    "qwen3": _Family("Qwen3ForCausalLM", pairs=False),
}


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor that has this name in Hugging Face checkpoints."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    linear, _, part = rest.rpartition(".")
    return f"blk.{layer}.{_IN_LAYERS[linear]}.{part}"


def has_paired_rows(file: GgufFile) -> bool:
    return _family(file).pairs


def form_of(file: GgufFile, name: str) -> StoredKind | None:
    """The kind of linear for the tensor with this name, which is GGUF's; None: floating point. Four
    bits in blocks of 32 are the linears' own form; the others become 8 bits."""
    kind = file.tensors[name].type.name
    if kind in _FLOATS:
        return None
    return "int4-32" if kind.startswith("Q4") else "int8"


def gguf_config(file: GgufFile) -> ModelConfig:
    """StartupError, with file and field: the metadata is incomplete, or a feature is not
    supported."""
    family = _family(file)
    fields = _of_architecture(file)
    if fields.integer("expert_count", 0, least=0):
        raise fields.wrong("expert_count", "mixtures of experts are not supported")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    vocab_size = _vocab_size(file)
    num_layers = fields.integer("block_count")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    return ModelConfig(
        architecture=family.architecture,
        family=FAMILIES[family.architecture],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        vocab_size=vocab_size,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        ropes=(_rope(file, fields),) * num_layers,
        attention_scale=head_dim**-0.5,
        tied_embeddings=gguf_name(HEAD) not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        windows=(_window(fields, family),) * num_layers,
        dtype=_dtype(file),
        eos_token_ids=_eos_token_ids(file.fields, vocab_size),
        generation=GenerationDefaults(),
        quantization=_quantization(file),
    )


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Raises StartupError, with the tensor: one is missing, unknown or of another shape, or a
    vector is quantized; or there are more tokens than rows of the embedding."""
    shapes = {gguf_name(name): shape for name, shape in weight_shapes(config).items()}
    if unknown := sorted(file.tensors.keys() - shapes.keys() - {ROPE_FACTORS}):
        raise StartupError(f"{file.path}: unknown tensors: {', '.join(unknown[:3])}")
    for name, shape in shapes.items():
        if name not in file.tensors:
            raise StartupError(f"{file.path}: missing tensor: {name}")
        tensor = file.tensors[name]
        if tensor.shape != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise StartupError(
                f"{file.path}: {name}: shape {found}, but metadata makes it {wanted}"
            )
        if len(shape) == 1 and tensor.type.name not in _FLOATS:
            raise StartupError(f"{file.path}: {name}: {tensor.type.name} is not a float type")
    tokens = file.metadata.get(TOKENS, [])
    if len(tokens) > config.vocab_size:
        raise file.fields.wrong(TOKENS, f"{len(tokens)}, but the model has {config.vocab_size}")


def _family(file: GgufFile) -> _Family:
    name = file.fields.text("general.architecture")
    if name not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise file.fields.wrong("general.architecture", f"{name!r} is not supported, only {known}")
    return _FAMILIES[name]


def _of_architecture(file: GgufFile) -> JsonFields:
    """The fields whose names begin with the architecture."""
    prefix = f"{file.fields.text('general.architecture')}."
    values = {
        name.removeprefix(prefix): value
        for name, value in file.metadata.items()
        if name.startswith(prefix)
    }
    return JsonFields(file.path, values, prefix)


def _vocab_size(file: GgufFile) -> int:
    embedding = gguf_name(EMBEDDING)
    if embedding not in file.tensors:
        raise StartupError(f"{file.path}: missing tensor: {embedding}")
    return file.tensors[embedding].shape[0]


def _num_kv_heads(fields: JsonFields, num_heads: int) -> int:
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("attention.head_count_kv", f"{num_kv_heads} does not divide {num_heads}")
    return num_kv_heads


def _head_dim(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.integer(name, head_dim)) != head_dim:
            raise fields.wrong(name, f"{other}, but the size of a head is {head_dim}")
    if head_dim % 2:
        raise fields.wrong("attention.key_length", f"{head_dim} is odd")
    return head_dim


def _window(fields: JsonFields, family: _Family) -> int | None:
    if not fields.has("attention.sliding_window"):
        return None
    if family.architecture != "LlamaForCausalLM":
        raise fields.wrong("attention.sliding_window", "not supported for this architecture")
    return fields.integer("attention.sliding_window")


def _rope(file: GgufFile, fields: JsonFields) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise fields.wrong("rope.scaling.type", f"{kind!r} is not supported, only none and linear")
    if ROPE_FACTORS in file.tensors:
        if kind == "linear":
            raise fields.wrong("rope.scaling.type", f"'linear' beside {ROPE_FACTORS}")
        return RopeConfig(theta, FrequencyDivisors(_floats(file, ROPE_FACTORS)))
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(fields.number("rope.scaling.factor")))
    return RopeConfig(theta)


def _floats(file: GgufFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise StartupError(f"{file.path}: {name}: not a vector of F32")
    with file.path.open("rb") as opened:
        opened.seek(tensor.begin)
        return struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes))


def _dtype(file: GgufFile) -> str:
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"


def _quantization(file: GgufFile) -> StoredQuantization | None:
    """`kind`: the narrowest of those of the linears in layers."""
    layers = (name for name, t in file.tensors.items() if "blk." in name and len(t.shape) == 2)
    kinds = sorted({kind for name in layers if (kind := form_of(file, name))})
    return StoredQuantization("gguf", kinds[0]) if kinds else None


def _eos_token_ids(fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    found = []
    for name in (f"tokenizer.ggml.{end}" for end in _END_TOKENS):
        if not fields.has(name):
            continue
        token_id = fields.integer(name, least=0)
        if token_id >= vocab_size:
            raise fields.wrong(name, f"{token_id} is outside the vocabulary {vocab_size}")
        found.append(token_id)
    return tuple(dict.fromkeys(found))
