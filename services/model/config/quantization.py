"""The ways in which the weights of linears are quantized: by a worker (`--quantize`), or in the
checkpoint (`quantization_config` of config.json)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from services.model.config.json_fields import JsonFields
from services.runtime.errors import StartupError

Quantization = Literal["int8", "int4", "int4-32", "int4-128"]
"""int8: a scale for each 32 inputs. int4: a scale and a zero point for each group of inputs; the
number is the size of a group, 64 by default; the head is int8. Activations have 16 bits."""

Format = Literal["gptq", "awq", "pack-quantized", "int-quantized", "fp8", "mxfp4", "gguf"]
"""How tensors of a checkpoint hold a quantized linear. Both pack-quantized (4 bits) and
int-quantized (8 bits) are of compressed-tensors, whose float-quantized is read as fp8."""

StoredKind = Literal["int8", "int8-16", "int4-32", "int4-64", "int4-128", "fp8", "fp8-128", "mxfp4"]
"""The kind of linear that has exactly the stored weights. fp8 has one scale for all inputs of an
output, and fp8-128 one for each block."""

FLOAT_KINDS: tuple[StoredKind, ...] = ("fp8", "fp8-128", "mxfp4")
"""The kinds that CPUs compute in bf16, and that may be quantized again."""


SUPPORTED = "Quire reads gptq, awq, compressed-tensors, fp8 and mxfp4, and GGUF files"
_GROUPS: dict[int, StoredKind] = {32: "int4-32", 64: "int4-64", 128: "int4-128"}
_BLOCK = [128, 128]


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint stores its quantized linears. A linear in floating point is not
    quantized."""

    format: Format
    kind: StoredKind | None
    """None if the weights are converted to bf16."""
    group: int = 0
    """The number of inputs that share a scale, for the int4 kinds."""
    symmetric: bool = False
    """Whether there are no zero points."""
    zero_offset: int = 0
    """The number that is added to a stored zero point."""
    block: bool = False
    """Whether fp8 weights have a scale for each 128 x 128 of them."""


def stored_quantization(config: JsonFields) -> StoredQuantization | None:
    """How the checkpoint with this config.json is quantized, or None if it is not. StartupError,
    with method and field: Quire cannot compute these weights exactly."""
    if config.has("quantization"):
        raise config.wrong("quantization", f"MLX's quantized weights are not read; {SUPPORTED}")
    if not config.has("quantization_config"):
        return None
    fields = config.object("quantization_config")
    method = fields.text("quant_method", "")
    if method not in _READERS:
        named = f"quantized by {method!r}" if method else "no quant_method"
        raise config.wrong("quantization_config", f"{named}; {SUPPORTED}")
    try:
        return _READERS[method](fields)
    except StartupError as error:
        raise StartupError(f"{error} (the checkpoint is quantized by {method!r})") from error


def _gptq(fields: JsonFields) -> StoredQuantization:
    _require(fields, "bits", 4)
    _require(fields, "desc_act", False, default=False)
    if fields.has("dynamic") and fields.values["dynamic"]:
        _refuse(fields, "dynamic", "other bits or groups for some linears are not supported")
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    form = fields.text(name, "gptq")
    if form not in ("gptq", "gptq_v2"):
        _refuse(fields, name, f"{form!r} is not supported, only 'gptq' and 'gptq_v2'")
    group = _group(fields)
    fields.boolean("sym", default=True)  # The zero points are stored in both cases.
    return StoredQuantization("gptq", _GROUPS[group], group, zero_offset=int(form == "gptq"))


def _awq(fields: JsonFields) -> StoredQuantization:
    _require(fields, "bits", 4)
    _require(fields, "zero_point", True, default=True)
    _require(fields, "backend", "autoawq", default="autoawq")
    version = fields.text("version", "gemm")
    if version.lower() != "gemm":
        _refuse(fields, "version", f"{version!r} is not supported, only 'gemm'")
    group = _group(fields)
    return StoredQuantization("awq", _GROUPS[group], group)


def _fp8(fields: JsonFields) -> StoredQuantization:
    _require(fields, "fmt", "e4m3", default="e4m3")
    _require(fields, "scale_fmt", "float", default="float")
    if fields.has("weight_block_size"):
        _require(fields, "weight_block_size", _BLOCK)
    has_blocks = fields.has("weight_block_size")
    return StoredQuantization("fp8", "fp8-128" if has_blocks else "fp8", block=has_blocks)


def _mxfp4(fields: JsonFields) -> StoredQuantization:
    """The experts of gpt-oss; a model without stacked experts has no such tensors."""
    return StoredQuantization("mxfp4", "mxfp4")


def _compressed(fields: JsonFields) -> StoredQuantization:
    for name in ("transform_config", "kv_cache_scheme"):
        if fields.values.get(name):
            _refuse(fields, name, "not supported")
    sparsity = fields.object("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        _refuse(fields, "sparsity_config", f"{sparsity!r} is not supported")
    groups = fields.object("config_groups")
    if len(groups.values) != 1:
        _refuse(fields, "config_groups", f"{len(groups.values)} groups are not supported, only 1")
    scheme = groups.object(next(iter(groups.values)))
    if scheme.has("output_activations"):
        _refuse(scheme, "output_activations", "quantized outputs are not supported")
    weights = scheme.object("weights")
    form = scheme.text("format", fields.text("format", ""))
    match form:
        case "pack-quantized":
            return _packed_int4(scheme, weights)
        case "int-quantized":
            return _int8(scheme, weights)
        case "float-quantized":
            return _float8(weights)
        case _:
            known = "pack-quantized, int-quantized and float-quantized"
            _refuse(fields, "format", f"{form!r} is not supported, only {known}")


_READERS: Mapping[str, Callable[[JsonFields], StoredQuantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _packed_int4(scheme: JsonFields, weights: JsonFields) -> StoredQuantization:
    _require(weights, "num_bits", 4)
    _require(weights, "type", "int")
    _require(weights, "strategy", "group")
    if weights.values.get("actorder") in (True, "group", "dynamic"):
        _refuse(weights, "actorder", "groups of inputs that are not neighbours are not supported")
    if scheme.has("input_activations"):
        _refuse(scheme, "input_activations", "not supported beside 4-bit weights")
    group = _group(weights)
    symmetric = weights.boolean("symmetric", default=True)
    return StoredQuantization("pack-quantized", _GROUPS[group], group, symmetric)


def _int8(scheme: JsonFields, weights: JsonFields) -> StoredQuantization:
    inputs = scheme.object("input_activations")
    for fields, strategy in ((weights, "channel"), (inputs, "token")):
        _require(fields, "num_bits", 8)
        _require(fields, "type", "int")
        _require(fields, "strategy", strategy)
        _require(fields, "symmetric", True, default=True)
    _require(inputs, "dynamic", True)
    return StoredQuantization("int-quantized", "int8", symmetric=True)


def _float8(weights: JsonFields) -> StoredQuantization:
    _require(weights, "num_bits", 8)
    _require(weights, "type", "float")
    _require(weights, "symmetric", True, default=True)
    strategy = weights.text("strategy")
    if strategy not in ("tensor", "channel", "block"):
        _refuse(weights, "strategy", f"{strategy!r} is not supported")
    if strategy == "block":
        _require(weights, "block_structure", _BLOCK)
    has_blocks = strategy == "block"
    kind: StoredKind = "fp8-128" if has_blocks else "fp8"
    return StoredQuantization("fp8", kind, symmetric=True, block=has_blocks)


def _group(fields: JsonFields) -> int:
    group = fields.values.get("group_size")
    if not isinstance(group, int) or group not in _GROUPS:
        reason = "; -1 is one scale for all inputs of an output" if group == -1 else ""
        _refuse(fields, "group_size", f"{group!r} is not 32, 64 or 128{reason}")
    return group


def _require(fields: JsonFields, name: str, wanted: object, default: object = None) -> None:
    value = fields.values[name] if fields.has(name) else default
    if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
        _refuse(fields, name, f"{value!r} is not supported, only {wanted!r}")


def _refuse(fields: JsonFields, name: str, text: str) -> NoReturn:
    raise fields.wrong(name, text)
