"""Makes a model's configuration from a GGUF file's metadata and tensors."""

import math
from collections.abc import Mapping
from typing import Any

from services.model.config.expert_config import ExpertConfig
from services.model.config.families import FAMILIES, Family, Number
from services.model.config.json_fields import JsonFields
from services.model.config.model_config import GenerationDefaults, ModelConfig
from services.model.config.neutral_fields import check_all_read
from services.model.config.quantization import StoredKind, StoredQuantization
from services.model.gguf.families import (
    GGUF_FAMILIES,
    GgufFamily,
    stored_family,
    stored_shapes,
    tensor_places,
)
from services.model.gguf.file import GgufFile
from services.model.gguf.rope import DIVISORS, LONG, SHORT, extended_context, read_ropes
from services.model.gguf.tokenizer import gguf_end_tokens
from services.runtime.errors import StartupError

TOKENS = "tokenizer.ggml.tokens"
_EMBEDDING = "token_embd.weight"
_FLOATS = ("F32", "F16", "BF16")
_EXACT = "MXFP4"
"""A type that is converted to bf16, which has all its values."""

_ROUTER = "ffn_gate_inp.weight"
_IGNORED = (
    *("vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "pooling_type"),
    "rope.scaling.finetuned",
)
"""Fields that do not change what a model computes."""

_NEUTRAL: Mapping[str, object] = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}
"""Fields that say nothing with this value."""

_SOFTMAX, _SOFTMAX_OF_CHOSEN = 1, 3
"""Values of `expert_gating_func`. The second is the first with weights divided by their sum."""


def form_of(file: GgufFile, name: str) -> StoredKind | None:
    """The kind of linear for the tensor with this name, which is GGUF's; None if it is in floating
    point. Four bits in blocks of 32 are the linears' own form; the others become 8 bits, Q6_K in
    blocks of 16."""
    kind = file.tensors[name].type.name
    if kind in _FLOATS or kind == _EXACT:
        return None
    if kind.startswith("Q4"):
        return "int4-32"
    return "int8-16" if kind == "Q6_K" else "int8"


def served_bytes(file: GgufFile, itemsize: int, dequantized: bool) -> int:
    """The bytes of a model's weights in memory, with `itemsize` bytes for a floating-point one."""
    sizes = {
        None: itemsize,
        "int8": 1.0625,
        "int8-16": 1.125,
        "int4-32": 0.625,
    }  # with scales and zero points
    values = {name: math.prod(tensor.shape) for name, tensor in file.tensors.items()}
    forms = {name: None if dequantized else form_of(file, name) for name in values}
    return int(sum(number * sizes[forms[name]] for name, number in values.items()))


def gguf_family(file: GgufFile) -> GgufFamily:
    name = file.fields.text("general.architecture")
    if name not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise file.fields.wrong("general.architecture", f"{name!r} is not supported, only {known}")
    return GGUF_FAMILIES[name]


def gguf_config(file: GgufFile) -> ModelConfig:
    """StartupError, with file and field: the metadata is incomplete, or a feature is not
    supported."""
    kind, fields = gguf_family(file), _of_architecture(file)
    architecture = kind.architecture
    if kind.with_experts is not None and fields.integer("expert_count", 0, least=0):
        architecture = kind.with_experts
    family = FAMILIES[architecture]
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    vocab_size = _vocab_size(file)
    num_layers = fields.integer("block_count")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    windows = _windows(fields, kind, num_layers)
    found = ModelConfig(
        architecture=architecture,
        family=stored_family(architecture),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        vocab_size=vocab_size,
        max_position_embeddings=extended_context(fields, family),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        ropes=read_ropes(file, fields, family, head_dim, windows),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias=_has(file, "attn_q.bias"),
        o_bias=_has(file, "attn_output.bias"),
        mlp_bias=_has(file, "ffn_up.bias"),
        windows=tuple(windows),
        dtype=_dtype(file),
        eos_token_ids=_eos_token_ids(file.fields, vocab_size),
        generation=_generation(file.fields),
        quantization=_quantization(file),
        experts=_experts(fields, family, num_layers),
        **_numbers(fields, kind, family, (hidden_size, num_heads, head_dim, num_layers)),
    )
    _check_all_read(fields, family)
    return found


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Raises StartupError, with the tensor: one is missing, unknown or of another shape, or a
    vector is quantized; or there are more tokens than rows of the embedding."""
    shapes = stored_shapes(config, tensor_places(config, gguf_family(file)))
    if unknown := sorted(file.tensors.keys() - shapes.keys() - {DIVISORS, LONG, SHORT}):
        raise StartupError(f"{file.path}: unknown tensors: {', '.join(unknown[:3])}")
    for name, shape in shapes.items():
        if name not in file.tensors:
            raise StartupError(f"{file.path}: missing tensor: {name}")
        tensor = file.tensors[name]
        if tensor.shape != shape:
            found, wanted = list(tensor.shape), list(shape)
            raise StartupError(
                f"{tensor.path}: {name}: shape {found}, but metadata makes it {wanted}"
            )
        is_linear = len(shape) > 1 and name.endswith(".weight")
        if not is_linear and tensor.type.name not in _FLOATS:
            raise StartupError(f"{tensor.path}: {name}: {tensor.type.name} is not a float type")
    tokens = file.metadata.get(TOKENS, [])
    if len(tokens) > config.vocab_size:
        raise file.fields.wrong(TOKENS, f"{len(tokens)}, but the model has {config.vocab_size}")


def _of_architecture(file: GgufFile) -> JsonFields:
    """The fields whose names begin with the architecture."""
    prefix = f"{file.fields.text('general.architecture')}."
    values = {
        name.removeprefix(prefix): value
        for name, value in file.metadata.items()
        if name.startswith(prefix)
    }
    return JsonFields(file.path, values, prefix)


def _check_all_read(fields: JsonFields, family: Family) -> None:
    """Raises StartupError, with the name, for a field that may change what the model computes."""
    if not fields.boolean("attention.causal", default=True):
        raise fields.wrong("attention.causal", "false is not supported")
    if "attention_multiplier" in family.numbers and not fields.boolean(
        "rope.scaling.finetuned", default=True
    ):  # llama.cpp's mark of Granite models without a rotation
        raise fields.wrong("rope.scaling.finetuned", "false is not supported for this architecture")
    neutral = [name for name, value in _NEUTRAL.items() if fields.values.get(name) == value]
    check_all_read(fields, [*_IGNORED, *neutral])


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}" in file.tensors


def _vocab_size(file: GgufFile) -> int:
    if _EMBEDDING not in file.tensors:
        raise StartupError(f"{file.path}: missing tensor: {_EMBEDDING}")
    return file.tensors[_EMBEDDING].shape[0]


def _num_kv_heads(fields: JsonFields, num_heads: int) -> int:
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("attention.head_count_kv", f"{num_kv_heads} does not divide {num_heads}")
    return num_kv_heads


def _head_dim(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if (other := fields.integer("attention.value_length", head_dim)) != head_dim:
        raise fields.wrong(
            "attention.value_length", f"{other}, but the size of a head is {head_dim}"
        )
    if head_dim % 2:
        raise fields.wrong("attention.key_length", f"{head_dim} is odd")
    return head_dim


def _windows(fields: JsonFields, kind: GgufFamily, num_layers: int) -> list[int | None]:
    """The attention window of each layer."""
    if kind.period is None:
        return [None] * num_layers
    window = fields.integer("attention.sliding_window", kind.default_window, least=0) or None
    name = "attention.sliding_window_pattern"
    match fields.value(name):
        case None:
            period = kind.period
        case [*flags]:
            if len(flags) != num_layers or not all(isinstance(flag, bool) for flag in flags):
                raise fields.wrong(name, f"not a list of {num_layers} of true and false")
            return [window if flag else None for flag in flags]
        case _:
            period = fields.integer(name, least=0)
    return [window if period == 0 or (layer + 1) % period else None for layer in range(num_layers)]


def _experts(fields: JsonFields, family: Family, num_layers: int) -> ExpertConfig | None:
    if family.experts is None:
        return None
    num, top_k = fields.integer("expert_count"), fields.integer("expert_used_count")
    if top_k > num:
        raise fields.wrong("expert_used_count", f"{top_k} of {num} experts")
    function = fields.integer("expert_gating_func", _SOFTMAX, least=0)
    normalizes = fields.boolean("expert_weights_norm", True) or function == _SOFTMAX_OF_CHOSEN
    if function not in (0, _SOFTMAX, _SOFTMAX_OF_CHOSEN):
        raise fields.wrong("expert_gating_func", f"{function} is not supported, only softmax (1)")
    width = fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length"))
    swiglu = family.defaults if family.experts.swiglu else {}
    return ExpertConfig(
        num,
        top_k,
        width,
        normalizes,
        (True,) * num_layers,
        swiglu.get("swiglu_alpha", 0.0),
        swiglu.get("swiglu_limit", 0.0),
    )


def _numbers(
    fields: JsonFields, kind: GgufFamily, family: Family, sizes: tuple[int, int, int, int]
) -> dict[str, Any]:
    """The fields of a ModelConfig that scale and bound values."""
    hidden_size, num_heads, head_dim, num_layers = sizes
    numbers = family.numbers
    scalar = hidden_size // num_heads if num_layers == kind.largest else head_dim

    def cap(name: Number) -> float | None:
        usual = family.defaults.get(name, 0.0)
        return fields.number(name, usual, positive=False) or None if name in numbers else None

    def factor(name: str, usual: float = 1.0) -> float:
        """llama.cpp takes 0 for an absent field."""
        is_read = "attention_multiplier" in numbers
        return fields.number(name, usual, positive=False) or usual if is_read else usual

    root = hidden_size**0.5
    return {
        "attention_scale": factor("attention.scale", scalar**-0.5),
        "attention_cap": cap("attn_logit_softcapping"),
        "embedding_scale": root if family.scaled_embedding else factor("embedding_scale"),
        "residual_scale": factor("residual_scale"),
        "logit_scale": 1.0 / factor("logit_scale"),
        "logit_cap": cap("final_logit_softcapping"),
    }


def _generation(fields: JsonFields) -> GenerationDefaults:
    """The sampling parameters that newer files recommend, as `llama-server` applies them."""
    names = {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    prefix = "general.sampling."
    values = {name: fields.values.get(f"{prefix}{theirs}") for name, theirs in names.items()}
    return GenerationDefaults.from_fields(JsonFields(fields.path, values, prefix))


def _dtype(file: GgufFile) -> str:
    """The router is always in fp32."""
    matrices = {n: t for n, t in file.tensors.items() if len(t.shape) > 1 and n.endswith(".weight")}
    kinds = {tensor.type.name for name, tensor in matrices.items() if not name.endswith(_ROUTER)}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"


def _quantization(file: GgufFile) -> StoredQuantization | None:
    """Return the file's quantization, with the narrowest kind that a linear of a layer has."""
    layers = (name for name, t in file.tensors.items() if "blk." in name and len(t.shape) > 1)
    kinds = sorted({kind for name in layers if (kind := form_of(file, name))})
    return StoredQuantization("gguf", kinds[0]) if kinds else None


def _eos_token_ids(fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Tokens beyond the vocabulary are refused."""
    for token_id in (found := gguf_end_tokens(fields)):
        if token_id >= vocab_size:
            raise fields.wrong(TOKENS, f"the end {token_id} is outside the vocabulary {vocab_size}")
    return found
