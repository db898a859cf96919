"""Reads the files of a LoRA adapter, as PEFT writes them: adapter_config.json and
adapter_model.safetensors. The weights are checked, and not kept.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.common.checkpoint.layout import Shape, weight_shapes
from services.common.checkpoint.weights import StoredTensor, read_header
from services.common.errors import InvalidRequest, StartupError
from services.common.text.model_config import ModelConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")
_LINEARS = tuple(
    f".{name}_proj"
    for name in (
        *("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"),
        *("mlp.gate", "mlp.up", "mlp.down"),
    )
)
_FLOATS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Of each dtype: integers of its size, and the bits of the exponent, which are all 1 in infinities
and NaN."""
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "megatron_config": (None,),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}
"""Fields of adapter_config.json that change the arithmetic, with the values that are supported."""
_IGNORED = (
    *("auto_mapping", "inference_mode", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("runtime_config", "ensure_weight_tying"),
)
"""Other fields that may be true, a list or an object: those of training, those that the tensors'
names tell, and those that are read below."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of `init_lora_weights` with which training changes the base model's weights too."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """`scale`: what B (A x) is multiplied by."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits a model. `linears`: those that it adds to, by name. `digest`: of both
    files."""

    directory: Path
    linears: Mapping[str, AdaptedLinear]
    digest: str

    @property
    def rank(self) -> int:
        return max(linear.rank for linear in self.linears.values())

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE

    @classmethod
    def read(cls, directory: Path, config: ModelConfig, max_rank: int) -> "AdapterFiles":
        """InvalidRequest, with file and field: the adapter is unreadable, is not for this model,
        has features that are not supported, weights that are no numbers, or a rank above
        `max_rank`."""
        try:
            fields = _fields((directory / CONFIG_FILE).read_text(encoding="utf-8"))
            header = read_header(directory / WEIGHTS_FILE)
            weights = (directory / WEIGHTS_FILE).read_bytes()
            digest = _digest((directory / CONFIG_FILE).read_bytes(), weights)
        except OSError as error:
            raise _refused(directory, f"{error.filename}: {error.strerror}") from error
        except (ValueError, RecursionError, StartupError) as error:
            raise _refused(directory, str(error)) from error
        _check_config(directory, fields)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in header.items()}
        ranks = _ranks(directory, shapes, weight_shapes(config))
        linears = {name: _adapted(directory, fields, name, rank) for name, rank in ranks.items()}
        files = cls(directory, linears, digest)
        if files.rank > max_rank:
            raise _refused(directory, f"rank {files.rank} is above max_lora_rank {max_rank}")
        _check_finite(directory, header, weights)
        return files


def _refused(directory: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(f"adapter {directory}: {problem}", "lora_path")


def _fields(config: str) -> dict[str, Any]:
    """ValueError: the text of adapter_config.json is not a JSON object."""
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{CONFIG_FILE} is not a JSON object")
    return fields


def _check_config(directory: Path, fields: Mapping[str, Any]) -> None:
    for name, supported in _PLAIN.items():
        if (value := fields.get(name, supported[0])) not in supported:
            raise _refused(directory, f"{name} {value!r} is not supported")
    for name in fields.keys() - _PLAIN.keys() - set(_IGNORED):
        if (value := fields[name]) is True or (value and isinstance(value, dict | list)):
            raise _refused(directory, f"{name} {value!r} is not supported")
    initial = fields.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise _refused(directory, f"init_lora_weights {initial!r} changes the base model's weights")


def _adapted(directory: Path, fields: Mapping[str, Any], name: str, rank: int) -> AdaptedLinear:
    """`rank`: of the tensors."""
    wanted = _of_linear(directory, fields, name, "rank_pattern", "r")
    alpha = _of_linear(directory, fields, name, "alpha_pattern", "lora_alpha")
    if rank != wanted or not isinstance(alpha, int | float) or not abs(alpha) < 2**31:
        raise _refused(directory, f"{name} has rank {rank}; r is {wanted!r}, lora_alpha {alpha!r}")
    return AdaptedLinear(rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))


def _of_linear(
    directory: Path, fields: Mapping[str, Any], name: str, pattern: str, default: str
) -> Any:
    """The value of the first key in the field `pattern` that is an end of the linear's name, as a
    regular expression; else that of the field `default`."""
    values = fields.get(pattern) or {}
    try:
        for key, value in values.items():
            if re.match(rf"(.*\.)?({key})$", name):
                return value
    except (AttributeError, re.error) as error:
        raise _refused(directory, f"{pattern} {values!r}: {error}") from error
    return fields.get(default)


def _ranks(
    directory: Path, tensors: Mapping[str, tuple[Shape, str]], base: Mapping[str, Shape]
) -> dict[str, int]:
    """The rank of each linear; every tensor is checked against the base model's."""
    found: dict[str, dict[str, Shape]] = {}
    for name, (shape, dtype) in tensors.items():
        match = _NAME.fullmatch(name)
        wanted = base.get(f"{match['linear']}.weight", ()) if match else ()
        if match is None or len(wanted) != 2 or not match["linear"].endswith(_LINEARS):
            linears = ", ".join(one.rpartition(".")[2] for one in _LINEARS)
            raise _refused(directory, f"{name} is not for one of this model's {linears}")
        if dtype not in _FLOATS or len(shape) != 2:
            raise _refused(directory, f"{name} has shape {list(shape)} and dtype {dtype}")
        found.setdefault(match["linear"], {})[match["side"]] = shape
    ranks = {}
    for linear, sides in found.items():
        n, k = base[f"{linear}.weight"]
        if set(sides) != {"A", "B"}:
            raise _refused(directory, f"{linear} has only lora_{''.join(sides)}")
        rank = sides["A"][0]
        if rank < 1 or sides["A"] != (rank, k) or sides["B"] != (n, rank):
            a, b = list(sides["A"]), list(sides["B"])
            raise _refused(directory, f"{linear} is [{n}, {k}], lora_A {a}, lora_B {b}")
        ranks[linear] = rank
    if not ranks:
        raise _refused(directory, "no lora_A and lora_B weights")
    return ranks


def _check_finite(directory: Path, header: Mapping[str, StoredTensor], weights: bytes) -> None:
    """A weight that is no number makes the logits of every request NaN."""
    first = len(weights) - max(tensor.end for tensor in header.values())
    for name, tensor in header.items():
        integer, exponent = _FLOATS[tensor.dtype]
        size = math.prod(tensor.shape)
        begin = first + tensor.end - size * np.dtype(integer).itemsize
        if begin < first:
            raise _refused(directory, f"{name} has fewer bytes than its shape needs")
        values = np.frombuffer(weights, integer, size, begin)
        if num_wrong := int(((values & exponent) == exponent).sum()):
            raise _refused(directory, f"{name} has {num_wrong} values that are NaN or infinite")


def _digest(*contents: bytes) -> str:
    import xxhash  # a check of a GPU imports this module, and has no xxhash

    digest = xxhash.xxh3_128()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
